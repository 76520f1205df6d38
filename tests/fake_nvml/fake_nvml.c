/* A libnvidia-ml.so.1 without hardware: eight H100-like GPUs, for tests of the nvml source.
 *
 * Written from the public description of NVML's interface: names, return codes and struct layouts
 * as nvidia-ml-py declares them. Every call reads the control file that FAKE_NVML_CONTROL names,
 * with lines of "<gpu or *> <key> <value>": lost, no_permission, unknown (flags), hang_s (seconds
 * that each call takes), utilization (per cent), init (return code of the initialisation),
 * init_hang_s (seconds that it takes), driver_gone (flag: every call says that the library is not
 * initialised). Every call on a GPU appends the GPU's digit to the file that FAKE_NVML_CALLS names,
 * a call that no GPU supports an x besides.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define GPUS 8
#define GIB (1024ULL * 1024 * 1024)

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    INSUFFICIENT_SIZE = 7,
    GPU_IS_LOST = 15,
    UNKNOWN = 999
};

typedef struct { int index; } gpu_t;
static gpu_t gpus[GPUS] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};

static double control(int index, const char *key, double otherwise)
{
    const char *path = getenv("FAKE_NVML_CONTROL");
    FILE *file = path ? fopen(path, "r") : NULL;
    char who[16], name[32];
    double value, found = otherwise;
    if (!file)
        return otherwise;
    while (fscanf(file, "%15s %31s %lf", who, name, &value) == 3)
        if (!strcmp(name, key) && (!strcmp(who, "*") || atoi(who) == index))
            found = value;
    fclose(file);
    return found;
}

static void count_call(char digit)
{
    const char *path = getenv("FAKE_NVML_CALLS");
    int fd = path ? open(path, O_WRONLY | O_APPEND | O_CREAT, 0644) : -1;
    if (fd >= 0) {
        if (write(fd, &digit, 1) != 1)
            abort();
        close(fd);
    }
}

static int gate(gpu_t *gpu)
{
    double hang_s;
    if (!gpu)
        return INVALID_ARGUMENT;
    count_call((char)('0' + gpu->index));
    hang_s = control(gpu->index, "hang_s", 0);
    if (hang_s > 0)
        usleep((useconds_t)(hang_s * 1e6));
    if (control(-1, "driver_gone", 0) != 0)
        return UNINITIALIZED;
    if (control(gpu->index, "lost", 0) != 0)
        return GPU_IS_LOST;
    if (control(gpu->index, "no_permission", 0) != 0)
        return NO_PERMISSION;
    if (control(gpu->index, "unknown", 0) != 0)
        return UNKNOWN;
    return SUCCESS;
}

#define GATE(gpu)                  \
    do {                           \
        int gate_code = gate(gpu); \
        if (gate_code)             \
            return gate_code;      \
    } while (0)

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double utilization(const gpu_t *gpu) { return control(gpu->index, "utilization", 50); }

static unsigned power_mw(const gpu_t *gpu) { return (unsigned)(70000 + 6000 * utilization(gpu)); }

/* the library */

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    usleep((useconds_t)(control(-1, "init_hang_s", 0) * 1e6));
    return (int)control(-1, "init", SUCCESS);
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int code)
{
    switch (code) {
    case UNINITIALIZED: return "Uninitialized";
    case NO_PERMISSION: return "Insufficient Permissions";
    case 9: return "Driver Not Loaded";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned length)
{
    snprintf(text, length, "580.65.06");
    return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) { *count = GPUS; return SUCCESS; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **gpu)
{
    if (index >= GPUS)
        return INVALID_ARGUMENT;
    GATE(&gpus[index]);
    *gpu = &gpus[index];
    return SUCCESS;
}

/* what describes a device */

int nvmlDeviceGetUUID(gpu_t *gpu, char *text, unsigned length)
{
    GATE(gpu);
    snprintf(text, length, "GPU-00000000-0000-0000-0000-%012d", gpu->index);
    return SUCCESS;
}

int nvmlDeviceGetName(gpu_t *gpu, char *text, unsigned length)
{
    GATE(gpu);
    snprintf(text, length, "NVIDIA H100 80GB HBM3");
    return SUCCESS;
}

int nvmlDeviceGetVbiosVersion(gpu_t *gpu, char *text, unsigned length)
{
    GATE(gpu);
    snprintf(text, length, "96.00.74.00.01");
    return SUCCESS;
}

int nvmlDeviceGetSerial(gpu_t *gpu, char *text, unsigned length)
{
    GATE(gpu);
    snprintf(text, length, "165000000%04d", gpu->index);
    return SUCCESS;
}

int nvmlDeviceGetArchitecture(gpu_t *gpu, unsigned *architecture)
{
    GATE(gpu);
    *architecture = 9;
    return SUCCESS;
}

struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(gpu_t *gpu, struct pci_info *info)
{
    GATE(gpu);
    memset(info, 0, sizeof *info);
    info->bus = 0x18 + (unsigned)gpu->index;
    snprintf(info->bus_id, sizeof info->bus_id, "00000000:%02X:00.0", info->bus);
    return SUCCESS;
}

/* what moves */

int nvmlDeviceGetUtilizationRates(gpu_t *gpu, unsigned rates[2])
{
    GATE(gpu);
    rates[0] = (unsigned)utilization(gpu);
    rates[1] = rates[0] / 2;
    return SUCCESS;
}

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(gpu_t *gpu, struct memory_v2 *info)
{
    GATE(gpu);
    info->total = 80 * GIB;
    info->reserved = GIB / 2;
    info->used = 20 * GIB;
    info->free = info->total - info->reserved - info->used;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(gpu_t *gpu, unsigned *milliwatts)
{
    GATE(gpu);
    *milliwatts = power_mw(gpu);
    return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(gpu_t *gpu, unsigned *milliwatts)
{
    GATE(gpu);
    *milliwatts = 700000;
    return SUCCESS;
}

struct temperature { unsigned version, sensor; int celsius; };

int nvmlDeviceGetTemperatureV(gpu_t *gpu, struct temperature *answer)
{
    GATE(gpu);
    answer->celsius = 40 + gpu->index;
    return SUCCESS;
}

int nvmlDeviceGetTemperatureThreshold(gpu_t *gpu, unsigned kind, unsigned *celsius)
{
    GATE(gpu);
    if (kind > 1)
        return NOT_SUPPORTED;
    *celsius = kind == 0 ? 92 : 87;
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(gpu_t *gpu, unsigned long long *bits)
{
    GATE(gpu);
    *bits = utilization(gpu) >= 99 ? 0x4 : 0x1;
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(gpu_t *gpu, unsigned domain, unsigned *megahertz)
{
    GATE(gpu);
    *megahertz = domain == 2 ? 2619 : 1755;
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(gpu_t *gpu, unsigned domain, unsigned *megahertz)
{
    GATE(gpu);
    *megahertz = domain == 2 ? 2619 : 1980;
    return SUCCESS;
}

int nvmlDeviceGetPerformanceState(gpu_t *gpu, unsigned *state)
{
    GATE(gpu);
    *state = 0;
    return SUCCESS;
}

struct bar1 { unsigned long long total, free, used; };

int nvmlDeviceGetBAR1MemoryInfo(gpu_t *gpu, struct bar1 *info)
{
    GATE(gpu);
    info->total = 128 * GIB;
    info->used = 2 * 1024 * 1024;
    info->free = info->total - info->used;
    return SUCCESS;
}

int nvmlDeviceGetEncoderUtilization(gpu_t *gpu, unsigned *per_cent, unsigned *period_us)
{
    (void)per_cent, (void)period_us;
    GATE(gpu);
    count_call('x');
    return NOT_SUPPORTED;
}

int nvmlDeviceGetCurrPcieLinkGeneration(gpu_t *gpu, unsigned *value)
{
    GATE(gpu);
    *value = 5;
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkWidth(gpu_t *gpu, unsigned *value)
{
    GATE(gpu);
    *value = 16;
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkGeneration(gpu_t *gpu, unsigned *value)
{
    GATE(gpu);
    *value = 5;
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkWidth(gpu_t *gpu, unsigned *value)
{
    GATE(gpu);
    *value = 16;
    return SUCCESS;
}

int nvmlDeviceGetRowRemapperHistogram(gpu_t *gpu, unsigned banks[5])
{
    GATE(gpu);
    memset(banks, 0, 5 * sizeof *banks);
    banks[0] = 2560;
    return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(gpu_t *gpu, unsigned *mode)
{
    GATE(gpu);
    *mode = 1;
    return SUCCESS;
}

int nvmlDeviceGetComputeMode(gpu_t *gpu, unsigned *mode)
{
    GATE(gpu);
    *mode = 0;
    return SUCCESS;
}

int nvmlDeviceGetMigMode(gpu_t *gpu, unsigned *now, unsigned *pending)
{
    GATE(gpu);
    *now = *pending = 0;
    return SUCCESS;
}

/* processes: one on every GPU, this very process */

struct process_info {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};

int nvmlDeviceGetComputeRunningProcesses_v3(gpu_t *gpu, unsigned *count, struct process_info *list)
{
    GATE(gpu);
    if (!list || *count < 1) {
        *count = 1;
        return INSUFFICIENT_SIZE;
    }
    *count = 1;
    list[0].pid = (unsigned)getpid();
    list[0].memory = 19 * GIB;
    list[0].gpu_instance = list[0].compute_instance = 0xFFFFFFFF;
    return SUCCESS;
}

/* field values */

struct field_value {
    uint32_t field, scope;
    int64_t timestamp, latency_us;
    int value_type, code;
    union { double d; unsigned u; unsigned long long ull; } value;
};

static int set(struct field_value *answer, unsigned long long value)
{
    answer->value_type = 3;
    answer->value.ull = value;
    return SUCCESS;
}

static int field(const gpu_t *gpu, struct field_value *answer)
{
    double seconds = now_s();
    if (answer->field >= 3 && answer->field <= 16)
        return set(answer, 0); /* ECC */
    if (answer->field >= 142 && answer->field <= 145)
        return set(answer, answer->field == 142 ? (unsigned)gpu->index : 0);
    if (answer->field >= 173 && answer->field <= 183)
        return set(answer, 0); /* PCIe errors */
    switch (answer->field) {
    case 1: return set(answer, 1);
    case 74: return set(answer, (unsigned long long)(seconds * 1e7)); /* a hundredth of the time */
    case 269: case 270: case 271: return set(answer, 0);
    case 82: return set(answer, 50);
    case 83: return set(answer, (unsigned long long)(seconds * power_mw(gpu)));
    case 94: return set(answer, 0);
    case 138: case 139:
        return answer->scope == 0xFFFFFFFF ? set(answer, (unsigned long long)(seconds * 1e6))
                                           : INVALID_ARGUMENT;
    case 186: return set(answer, power_mw(gpu));
    case 187: return set(answer, 200000);
    case 188: case 189: return set(answer, 700000);
    case 197: case 198: return set(answer, (unsigned)(uint64_t)(seconds * 4e9)); /* wraps */
    case 230: return set(answer, ~0ULL); /* not available */
    default: return NOT_SUPPORTED;
    }
}

int nvmlDeviceGetFieldValues(gpu_t *gpu, int count, struct field_value *answers)
{
    GATE(gpu);
    for (int i = 0; i < count; i++)
        answers[i].code = field(gpu, &answers[i]);
    return SUCCESS;
}
