/* What the parts of the fake driver share. The interface itself is NVIDIA's own nvml.h. */
#ifndef FAKENVML_H
#define FAKENVML_H

#define _GNU_SOURCE
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <math.h>
#include <nvml.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* FUNCTIONS(X): every function of the library, collected from the sources at build time. */
#include "functions.h"

enum {
    MAX_GPUS = 16,
    LIBRARY = MAX_GPUS, /* the row of calls that are on no GPU */
    MAX_LINKS = 18,
    MAX_MIG_DEVICES = 8,
    MAX_MIG_PROFILES = 8,
    MAX_PROCESSES = 32,
    MAX_EVENTS = 256,
    MAX_FIELDS = 320,
    REASONS = 16,         /* bits of the clock event reasons */
    SENSOR_SAMPLES = 120, /* length of the driver's sample buffers */
};

#define NO_INSTANCE 0xFFFFFFFFU
#define MIB (1024ULL * 1024)

#define FUNCTION(name) F_##name,
typedef enum { FUNCTIONS(FUNCTION) FUNCTION_COUNT } function_t;
#undef FUNCTION

#define SETTING(name, otherwise, meaning) SET_##name,
typedef enum {
#include "settings.def"
    SETTING_COUNT
} setting_t;
#undef SETTING

/* profiles.c: what a kind of GPU is and what it can tell */

typedef struct {
    const char *name; /* such as 1g.10gb */
    unsigned profile, id, slices, instances, multiprocessors, memory_mib, copy_engines, decoders;
} mig_profile_t;

typedef struct {
    const char *key, *name, *vbios, *serial_prefix;
    unsigned architecture, cc_major, cc_minor, pci_device, pci_subsystem;
    unsigned memory_mib, reserved_mib, used_mib, bar1_mib, multiprocessors;
    unsigned clock_max, clock_busy, clock_idle, clock_memory, clock_video_max;
    unsigned idle_w, full_w, limit_w, min_limit_w, max_limit_w;
    unsigned shutdown_c, slowdown_c, memory_max_c, gpu_max_c; /* 0: not reported */
    int shutdown_tlimit, slowdown_tlimit, memory_max_tlimit, gpu_max_tlimit;
    unsigned fans, pcie_generation, pcie_width;
    unsigned nvlinks, nvlink_version, nvlink_mbps;
    unsigned row_banks; /* 0: no row remapping */
    bool memory_temperature, t_limit, power_average, power_instant;
    bool ecc, ecc_on, retired_pages, event_counters, pcie_counters, jpeg_ofa, gpm, recovery_action;
    bool nvlink_dl_errors, nvlink_counts, nvswitch, fabric;
    mig_profile_t mig[MAX_MIG_PROFILES];
} profile_t;

const profile_t *profile_named(const char *key); /* NULL: no such profile */

/* control.c, control_file.c: what the control file says, read again when it changed */

typedef struct {
    unsigned slot, gi, ci, compute_slices;
    const mig_profile_t *profile;
} mig_t;

typedef struct {
    unsigned pid, gi, ci;
    unsigned long long memory_bytes;
    char kind; /* C compute, G graphics, M under MPS */
} process_t;

typedef struct {
    unsigned gpu, gi, ci;
    unsigned long long sequence, type, data;
} event_t;

typedef struct {
    double settings[SETTING_COUNT];
    const profile_t *profile;
    int error[FUNCTION_COUNT];
    double latency_us[FUNCTION_COUNT]; /* NAN: as any call */
    bool hang[FUNCTION_COUNT];
    int field_error[MAX_FIELDS], field_fails_call[MAX_FIELDS];
    bool field_is_set[MAX_FIELDS];
    nvmlValueType_t field_type[MAX_FIELDS];
    nvmlValue_t field_value[MAX_FIELDS];
    char mig_layout[512];
    bool mig_mode;
    unsigned mig_count, process_count;
    mig_t mig[MAX_MIG_DEVICES];
    process_t processes[MAX_PROCESSES];
} gpu_control_t;

typedef struct {
    gpu_control_t rows[MAX_GPUS + 1];
    unsigned count, order[MAX_GPUS]; /* of an index: the number of its GPU */
    unsigned event_count;
    event_t events[MAX_EVENTS];
    char driver_version[64];
} control_t;

const control_t *control(void);
double setting(const gpu_control_t *row, setting_t name, double of_profile);
void read_control(control_t *new, const char *path);
double monotonic_s(void);
bool clock_is_set(void); /* by the control file: then it stands still between its changes */
unsigned long long wall_us(double monotonic); /* microseconds since 1970 */

/* calls.c: how often each function was called */

void map_counters(void);
void count_call(unsigned row, function_t function);

/* library.c: what happens at the door of every call */

struct nvmlDevice_st {
    unsigned gpu;
    bool is_mig;
    unsigned slot, gi, ci;
    const mig_profile_t *profile;
};

typedef struct {
    unsigned gpu;
    const control_t *control;
    const gpu_control_t *row;
    const profile_t *profile;
    const mig_t *mig; /* NULL: the whole GPU */
} call_t;

nvmlReturn_t enter(call_t *call, nvmlDevice_t device, function_t function);
nvmlReturn_t enter_library(const control_t **now, function_t function);
bool on_gpu(call_t *call, nvmlDevice_t device);
nvmlDevice_t gpu_handle(unsigned gpu);
nvmlDevice_t mig_handle(unsigned gpu, const mig_t *mig);
nvmlReturn_t write_text(char *target, unsigned length, const char *text);

/* Begin a call on a device: count it, let it take its time, and answer with its fault if any. */
#define ENTER(device, function)                                     \
    call_t call;                                                    \
    do {                                                            \
        nvmlReturn_t at_door = enter(&call, (device), F_##function); \
        if (at_door != NVML_SUCCESS)                                \
            return at_door;                                         \
    } while (0)

#define REFUSE_IF(condition, code) \
    do {                           \
        if (condition)             \
            return (code);         \
    } while (0)
#define NEEDS(pointer) REFUSE_IF(!(pointer), NVML_ERROR_INVALID_ARGUMENT)
#define SUPPORTED(condition) REFUSE_IF(!(condition), NVML_ERROR_NOT_SUPPORTED)
#define WHOLE_GPU SUPPORTED(!call.mig)
#define VERSION(answer, expected) \
    REFUSE_IF((answer)->version != (expected), NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
#define GET(name, of_profile) setting(call.row, SET_##name, (of_profile))
#define FLAG(name) (GET(name, 0) != 0)

/* motion.c: what moves with time */

typedef struct {
    unsigned long long timestamp_us;
    float power_w, gpu, memory, encoder, decoder, jpeg, ofa;
} sensor_sample_t;

typedef struct {
    double at_s;        /* on the monotonic clock */
    double load_s;      /* time under load, integrated */
    double energy_j;
    double reason_s[REASONS]; /* time with each clock event reason */
} motion_t;

double load_percent(const gpu_control_t *row, double at_s);
double power_w(const gpu_control_t *row, double at_s);
unsigned long long event_reasons(const gpu_control_t *row, double at_s);
motion_t move(unsigned gpu, const gpu_control_t *row);
void move_all(const control_t *before);
void begin_again(void);
double pcie_bytes(const motion_t *motion);
double nvlink_kib(const motion_t *motion);
unsigned sensor_samples(unsigned gpu, const gpu_control_t *row, unsigned long long after_us,
                        sensor_sample_t found[SENSOR_SAMPLES]);

/* other parts */

int temperature_c(const call_t *call);
bool under_load(const call_t *call);
unsigned limit_mw(const call_t *call);
bool ecc_is_on(const call_t *call);
bool link_active(const call_t *call, unsigned link);
unsigned used_mib(const call_t *call);
unsigned list_processes(const call_t *call, char kind, process_t found[MAX_PROCESSES]);

#endif
