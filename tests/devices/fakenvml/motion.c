/* What moves with time: load, power, energy, traffic, throttled time and the sample buffers. */
#include "fakenvml.h"

#include <pthread.h>
#include <time.h>

/* The driver samples its sensors six times a second. */
static const double SENSOR_PERIOD_S = 1.0 / 6;
/* Traffic under full load: the order of a training job's, not of a link's limit. */
static const double PCIE_BYTES_PER_S = 8e9;
static const double NVLINK_KIB_PER_S = 2e6;
/* Even an idle GPU meets its power limit now and then. */
static const double POWER_CAP_RATIO = 0.01;

typedef struct {
    pthread_mutex_t lock;
    motion_t motion;
    unsigned long long samples; /* since the beginning */
    double sampled_s;
    sensor_sample_t ring[SENSOR_SAMPLES];
} moving_t;

static moving_t moving[MAX_GPUS] = {
    [0 ... MAX_GPUS - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER},
};

/* The time integral of the load from 0 to at_s, in per cent times seconds. */
static double load_integral(const gpu_control_t *row, double at_s)
{
    double swing = row->settings[SET_load_swing];
    double turn = 2 * M_PI / row->settings[SET_load_period_s];
    double mean = row->settings[SET_load] * at_s;
    return swing == 0 ? mean : mean - swing / turn * cos(turn * at_s);
}

double load_percent(const gpu_control_t *row, double at_s)
{
    double swing = row->settings[SET_load_swing];
    double load = row->settings[SET_load];
    if (swing != 0)
        load += swing * sin(2 * M_PI / row->settings[SET_load_period_s] * at_s);
    return load < 0 ? 0 : load > 100 ? 100 : load;
}

static double mean_load(const gpu_control_t *row, double from_s, double to_s)
{
    if (row->settings[SET_load_swing] == 0 || to_s <= from_s)
        return load_percent(row, to_s);
    return (load_integral(row, to_s) - load_integral(row, from_s)) / (to_s - from_s);
}

static double power_at_load(const gpu_control_t *row, double load)
{
    const profile_t *profile = row->profile;
    return setting(row, SET_power_w,
                   profile->idle_w + load / 100 * (profile->full_w - profile->idle_w));
}

double power_w(const gpu_control_t *row, double at_s)
{
    return power_at_load(row, load_percent(row, at_s));
}

unsigned long long event_reasons(const gpu_control_t *row, double at_s)
{
    double idle = load_percent(row, at_s) < 1 ? nvmlClocksEventReasonGpuIdle : 0;
    return (unsigned long long)setting(row, SET_throttle_reasons, idle);
}

static void take_sample(moving_t *gpu, const gpu_control_t *row, double at_s)
{
    double load = mean_load(row, at_s - SENSOR_PERIOD_S, at_s);
    gpu->ring[gpu->samples++ % SENSOR_SAMPLES] = (sensor_sample_t){
        .timestamp_us = wall_us(at_s),
        .power_w = (float)power_at_load(row, load),
        .gpu = (float)load,
        .memory = (float)setting(row, SET_memory_load, load / 2),
        .encoder = (float)row->settings[SET_encoder],
        .decoder = (float)row->settings[SET_decoder],
        .jpeg = (float)row->settings[SET_jpeg],
        .ofa = (float)row->settings[SET_ofa],
    };
}

static void take_samples(moving_t *gpu, const gpu_control_t *row, double now_s)
{
    double oldest_s = now_s - SENSOR_SAMPLES * SENSOR_PERIOD_S;
    if (gpu->sampled_s < oldest_s)
        gpu->sampled_s = oldest_s;
    /* Sums of periods round, the more so the longer the machine has been up. */
    while (gpu->sampled_s + SENSOR_PERIOD_S <= now_s + 1e-6) {
        gpu->sampled_s += SENSOR_PERIOD_S;
        take_sample(gpu, row, gpu->sampled_s);
    }
}

static void integrate(motion_t *motion, const gpu_control_t *row, double now_s)
{
    double passed_s = now_s - motion->at_s;
    double load = mean_load(row, motion->at_s, now_s);
    unsigned long long reasons = event_reasons(row, now_s);
    motion->load_s += passed_s * load / 100;
    motion->energy_j += passed_s * power_at_load(row, load);
    for (unsigned bit = 0; bit < REASONS; bit++)
        if (reasons >> bit & 1)
            motion->reason_s[bit] += passed_s;
    if (!(reasons & nvmlClocksEventReasonSwPowerCap))
        motion->reason_s[2] += passed_s * POWER_CAP_RATIO;
    motion->at_s = now_s;
}

static motion_t move_locked(moving_t *gpu, const gpu_control_t *row, double now_s)
{
    if (now_s > gpu->motion.at_s) {
        integrate(&gpu->motion, row, now_s);
        take_samples(gpu, row, now_s);
    }
    return gpu->motion;
}

motion_t move(unsigned gpu, const gpu_control_t *row)
{
    double now_s = monotonic_s();
    pthread_mutex_lock(&moving[gpu].lock);
    motion_t motion = move_locked(&moving[gpu], row, now_s);
    pthread_mutex_unlock(&moving[gpu].lock);
    return motion;
}

/* To be called before settings change, so that the time until now counts under the old ones. */
void move_all(const control_t *before)
{
    for (unsigned gpu = 0; gpu < MAX_GPUS; gpu++)
        move(gpu, &before->rows[gpu]);
}

/* A driver that was loaded again counts from zero. The first has counted since the machine started.
 */
void begin_again(void)
{
    for (unsigned gpu = 0; gpu < MAX_GPUS; gpu++) {
        pthread_mutex_lock(&moving[gpu].lock);
        moving[gpu].motion = (motion_t){.at_s = monotonic_s()};
        moving[gpu].samples = 0;
        memset(moving[gpu].ring, 0, sizeof moving[gpu].ring);
        moving[gpu].sampled_s = moving[gpu].motion.at_s;
        pthread_mutex_unlock(&moving[gpu].lock);
    }
}

double pcie_bytes(const motion_t *motion) { return motion->load_s * PCIE_BYTES_PER_S; }

double nvlink_kib(const motion_t *motion) { return motion->load_s * NVLINK_KIB_PER_S; }

unsigned sensor_samples(unsigned gpu, const gpu_control_t *row, unsigned long long after_us,
                        sensor_sample_t found[SENSOR_SAMPLES])
{
    moving_t *of = &moving[gpu];
    unsigned count = 0;
    pthread_mutex_lock(&of->lock);
    move_locked(of, row, monotonic_s());
    for (unsigned i = 0; i < SENSOR_SAMPLES; i++) {
        const sensor_sample_t *sample = &of->ring[(of->samples + i) % SENSOR_SAMPLES];
        if (sample->timestamp_us > after_us)
            found[count++] = *sample;
    }
    pthread_mutex_unlock(&of->lock);
    return count;
}
