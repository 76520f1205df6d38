/* The library itself: initialisation, handles, and what happens at the door of every call. */
#include "fakenvml.h"

#include <pthread.h>
#include <time.h>

enum { MAX_MIG_HANDLES = 512, SPIN_AT_MOST_US = 1000 };

static struct nvmlDevice_st gpu_handles[MAX_GPUS];
static struct nvmlDevice_st mig_handles[MAX_MIG_HANDLES];
static _Atomic unsigned mig_handle_count;
static pthread_mutex_t adding = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int users;
/* The driver went while the library was in use: only a new initialisation helps, and one that finds
 * users just counts. */
static _Atomic bool dead;

static void sleep_us(double us)
{
    struct timespec time = {(time_t)(us / 1e6), (long)(fmod(us, 1e6) * 1e3)};
    nanosleep(&time, NULL);
}

static void take_time(const gpu_control_t *row, function_t function)
{
    double us = row->latency_us[function];
    if (isnan(us))
        us = row->settings[SET_latency_us];
    if (us > SPIN_AT_MOST_US)
        sleep_us(us);
    else if (us > 0)
        for (double end_s = monotonic_s() + us / 1e6; monotonic_s() < end_s;)
            ;
}

/* Stay as long as the control file says so. */
static const control_t *wait_out(const control_t *now, unsigned row, function_t function)
{
    while (now->rows[row].hang[function] || now->rows[row].settings[SET_hang] != 0) {
        sleep_us(5000);
        now = control();
    }
    return now;
}

static nvmlReturn_t fault(const gpu_control_t *row, function_t function)
{
    static const struct {
        setting_t setting;
        nvmlReturn_t code;
    } faults[] = {
        {SET_driver_gone, NVML_ERROR_UNINITIALIZED},
        {SET_version_mismatch, NVML_ERROR_LIB_RM_VERSION_MISMATCH},
        {SET_absent, NVML_ERROR_GPU_IS_LOST},
        {SET_lost, NVML_ERROR_GPU_IS_LOST},
        {SET_reset_required, NVML_ERROR_RESET_REQUIRED},
        {SET_no_permission, NVML_ERROR_NO_PERMISSION},
        {SET_not_supported, NVML_ERROR_NOT_SUPPORTED},
        {SET_unknown, NVML_ERROR_UNKNOWN},
    };
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
        if (row->settings[faults[i].setting] != 0)
            return faults[i].code;
    return row->error[function];
}

static nvmlReturn_t at_door(const control_t **now, unsigned row, function_t function)
{
    *now = control();
    count_call(row, function);
    take_time(&(*now)->rows[row], function);
    *now = wait_out(*now, row, function);
    const double *settings = (*now)->rows[LIBRARY].settings;
    bool mismatch = settings[SET_version_mismatch] != 0;
    if (mismatch || settings[SET_driver_gone] != 0)
        atomic_store(&dead, true);
    if (users == 0 || (dead && !mismatch))
        return NVML_ERROR_UNINITIALIZED;
    return fault(&(*now)->rows[row], function);
}

nvmlReturn_t enter_library(const control_t **now, function_t function)
{
    return at_door(now, LIBRARY, function);
}

static bool is_among(nvmlDevice_t device, const struct nvmlDevice_st *handles, size_t count)
{
    uintptr_t at = (uintptr_t)device - (uintptr_t)handles;
    return (uintptr_t)device >= (uintptr_t)handles && at < count * sizeof *handles &&
           at % sizeof *handles == 0;
}

static bool is_handle(nvmlDevice_t device)
{
    return is_among(device, gpu_handles, MAX_GPUS) ||
           is_among(device, mig_handles, mig_handle_count);
}

/* NULL: the device has been destroyed since. */
static const mig_t *current_mig(const gpu_control_t *row, nvmlDevice_t device)
{
    for (unsigned i = 0; i < row->mig_count; i++) {
        const mig_t *mig = &row->mig[i];
        if (mig->slot == device->slot && mig->gi == device->gi && mig->ci == device->ci &&
            mig->profile == device->profile)
            return mig;
    }
    return NULL;
}

/* Fill in what a call works with; false: no such device. */
bool on_gpu(call_t *call, nvmlDevice_t device)
{
    if (!is_handle(device))
        return false;
    call->gpu = device->gpu;
    call->control = control();
    call->row = &call->control->rows[device->gpu];
    call->profile = call->row->profile;
    call->mig = device->is_mig ? current_mig(call->row, device) : NULL;
    return !device->is_mig || call->mig;
}

nvmlReturn_t enter(call_t *call, nvmlDevice_t device, function_t function)
{
    unsigned row = is_handle(device) ? device->gpu : (unsigned)LIBRARY;
    nvmlReturn_t code = at_door(&call->control, row, function);
    REFUSE_IF(code != NVML_SUCCESS, code);
    return on_gpu(call, device) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlDevice_t gpu_handle(unsigned gpu)
{
    gpu_handles[gpu].gpu = gpu;
    return &gpu_handles[gpu];
}

/* A device that stays keeps its handle; one that was destroyed and made again otherwise does not. */
nvmlDevice_t mig_handle(unsigned gpu, const mig_t *mig)
{
    struct nvmlDevice_st wanted = {gpu, true, mig->slot, mig->gi, mig->ci, mig->profile};
    nvmlDevice_t found = NULL;
    pthread_mutex_lock(&adding);
    for (unsigned i = 0; i < mig_handle_count && !found; i++) {
        const struct nvmlDevice_st *old = &mig_handles[i];
        if (old->gpu == gpu && old->slot == mig->slot && old->gi == mig->gi && old->ci == mig->ci &&
            old->profile == mig->profile)
            found = &mig_handles[i];
    }
    if (!found && mig_handle_count < MAX_MIG_HANDLES) {
        found = &mig_handles[mig_handle_count];
        *found = wanted;
        mig_handle_count++;
    }
    pthread_mutex_unlock(&adding);
    return found;
}

nvmlReturn_t write_text(char *target, unsigned length, const char *text)
{
    NEEDS(target);
    REFUSE_IF(strlen(text) >= length, NVML_ERROR_INSUFFICIENT_SIZE);
    strcpy(target, text);
    return NVML_SUCCESS;
}

static nvmlReturn_t initialise(function_t function)
{
    const control_t *now = control();
    count_call(LIBRARY, function);
    take_time(&now->rows[LIBRARY], function);
    const gpu_control_t *row = &wait_out(now, LIBRARY, function)->rows[LIBRARY];
    if (users == 0) {
        REFUSE_IF(row->settings[SET_driver_gone] != 0, NVML_ERROR_DRIVER_NOT_LOADED);
        REFUSE_IF(row->settings[SET_version_mismatch] != 0, NVML_ERROR_LIB_RM_VERSION_MISMATCH);
        REFUSE_IF(row->settings[SET_init] != 0, (nvmlReturn_t)row->settings[SET_init]);
        REFUSE_IF(row->error[function] != 0, row->error[function]);
        if (atomic_exchange(&dead, false))
            begin_again();
    }
    users++;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInit(void) { return initialise(F_nvmlInit); }

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return initialise(F_nvmlInitWithFlags);
}

nvmlReturn_t nvmlShutdown(void)
{
    count_call(LIBRARY, F_nvmlShutdown);
    REFUSE_IF(users == 0, NVML_ERROR_UNINITIALIZED);
    users--;
    return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "The operating system has blocked the request.",
        "RM has detected an NVML/RM version mismatch.",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "Reserved 22",
        "Insufficient Resources",
        "Frequency not supported",
        "Argument version mismatch",
        "Deprecated",
        "System not ready",
        "GPU not found",
        "Invalid state",
    };
    return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "Unknown Error";
}
