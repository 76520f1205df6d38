/* Event sets: each sees every event once that was raised after it was registered for it. */
#include "fakenvml.h"

#include <pthread.h>
#include <time.h>

enum { MAX_SETS = 64, POLL_NS = 100 * 1000 * 1000 };

typedef struct {
    unsigned long long types, seen; /* sequence number of the newest event delivered */
    bool loss_reported;
} registration_t;

struct nvmlEventSet_st {
    bool used;
    registration_t registrations[MAX_GPUS];
};

static struct nvmlEventSet_st sets[MAX_SETS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_set(nvmlEventSet_t set)
{
    uintptr_t at = (uintptr_t)set - (uintptr_t)sets;
    return set >= sets && at < sizeof sets && at % sizeof *sets == 0 && set->used;
}

static unsigned long long newest_event(const control_t *now)
{
    unsigned long long newest = 0;
    for (unsigned i = 0; i < now->event_count; i++)
        if (now->events[i].sequence > newest)
            newest = now->events[i].sequence;
    return newest;
}

static unsigned long long supported_types(const call_t *call)
{
    unsigned long long types =
        nvmlEventTypePState | nvmlEventTypeXidCriticalError | nvmlEventTypeClock;
    if (ecc_is_on(call))
        types |= nvmlEventTypeSingleBitEccError | nvmlEventTypeDoubleBitEccError;
    if (call->profile->row_banks)
        types |= nvmlEventTypeSingleBitEccErrorStorm | nvmlEventTypeDramRetirementEvent |
                 nvmlEventTypeDramRetirementFailure;
    if (call->profile->recovery_action)
        types |= nvmlEventTypeNonFatalPoisonError | nvmlEventTypeFatalPoisonError |
                 nvmlEventTypeGpuUnavailableError | nvmlEventTypeGpuRecoveryAction;
    return types;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    ENTER(device, nvmlDeviceGetSupportedEventTypes);
    NEEDS(types);
    WHOLE_GPU;
    *types = supported_types(&call);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    const control_t *now;
    nvmlReturn_t code = enter_library(&now, F_nvmlEventSetCreate);
    REFUSE_IF(code != NVML_SUCCESS, code);
    NEEDS(set);
    *set = NULL;
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < MAX_SETS && !*set; i++)
        if (!sets[i].used) {
            sets[i] = (struct nvmlEventSet_st){.used = true};
            *set = &sets[i];
        }
    pthread_mutex_unlock(&lock);
    return *set ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_RESOURCES;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types,
                                      nvmlEventSet_t set)
{
    ENTER(device, nvmlDeviceRegisterEvents);
    NEEDS(is_set(set));
    WHOLE_GPU;
    SUPPORTED((types & ~supported_types(&call)) == 0);
    pthread_mutex_lock(&lock);
    registration_t *registration = &set->registrations[call.gpu];
    if (!registration->types)
        registration->seen = newest_event(call.control);
    registration->types |= types;
    pthread_mutex_unlock(&lock);
    return NVML_SUCCESS;
}

static bool next_event(nvmlEventSet_t set, const control_t *now, nvmlEventData_t *data)
{
    for (unsigned i = 0; i < now->event_count; i++) {
        const event_t *event = &now->events[i];
        registration_t *registration = &set->registrations[event->gpu];
        if (event->sequence <= registration->seen || !(event->type & registration->types))
            continue;
        registration->seen = event->sequence;
        *data = (nvmlEventData_t){gpu_handle(event->gpu), event->type, event->data, event->gi,
                                  event->ci};
        return true;
    }
    return false;
}

/* A GPU that is lost raises its XID once; after that there is nothing to wait for. */
static nvmlReturn_t next_loss(nvmlEventSet_t set, const control_t *now, nvmlEventData_t *data)
{
    nvmlReturn_t code = NVML_ERROR_TIMEOUT;
    for (unsigned gpu = 0; gpu < MAX_GPUS; gpu++) {
        registration_t *registration = &set->registrations[gpu];
        const double *settings = now->rows[gpu].settings;
        bool lost = settings[SET_lost] != 0 && registration->types;
        bool raises =
            settings[SET_lost_xid] != 0 && registration->types & nvmlEventTypeXidCriticalError;
        if (lost && !registration->loss_reported && raises) {
            registration->loss_reported = true;
            *data = (nvmlEventData_t){gpu_handle(gpu), nvmlEventTypeXidCriticalError,
                                      (unsigned long long)settings[SET_lost_xid], NO_INSTANCE,
                                      NO_INSTANCE};
            return NVML_SUCCESS;
        }
        registration->loss_reported &= lost;
        code = lost ? NVML_ERROR_GPU_IS_LOST : code;
    }
    return code;
}

static nvmlReturn_t look(nvmlEventSet_t set, const control_t *now, nvmlEventData_t *data)
{
    REFUSE_IF(now->rows[LIBRARY].settings[SET_driver_gone] != 0, NVML_ERROR_UNINITIALIZED);
    pthread_mutex_lock(&lock);
    nvmlReturn_t code = !is_set(set)                 ? NVML_ERROR_INVALID_ARGUMENT
                        : next_event(set, now, data) ? NVML_SUCCESS
                                                     : next_loss(set, now, data);
    pthread_mutex_unlock(&lock);
    return code;
}

nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms)
{
    const struct timespec pause = {0, POLL_NS};
    const control_t *now;
    double end_s = monotonic_s() + timeout_ms / 1e3;
    nvmlReturn_t code = enter_library(&now, F_nvmlEventSetWait_v2);
    REFUSE_IF(code != NVML_SUCCESS, code);
    NEEDS(is_set(set) && data);
    while ((code = look(set, now, data)) == NVML_ERROR_TIMEOUT && monotonic_s() < end_s &&
           !clock_is_set()) {
        nanosleep(&pause, NULL);
        now = control();
    }
    return code;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    const control_t *now;
    nvmlReturn_t code = enter_library(&now, F_nvmlEventSetFree);
    NEEDS(is_set(set));
    pthread_mutex_lock(&lock);
    set->used = false;
    pthread_mutex_unlock(&lock);
    return code;
}
