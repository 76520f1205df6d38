/* Clocks and power. */
#include "fakenvml.h"

unsigned limit_mw(const call_t *call)
{
    return (unsigned)(1000 * setting(call->row, SET_power_limit_w, call->profile->limit_w));
}

bool under_load(const call_t *call) { return load_percent(call->row, monotonic_s()) >= 1; }

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *power)
{
    ENTER(device, nvmlDeviceGetPowerUsage);
    NEEDS(power);
    WHOLE_GPU;
    *power = FLAG(sentinels) ? ~0U : (unsigned)(1000 * power_w(call.row, monotonic_s()));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned int *limit)
{
    ENTER(device, nvmlDeviceGetPowerManagementLimit);
    NEEDS(limit);
    WHOLE_GPU;
    *limit = limit_mw(&call);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *limit)
{
    ENTER(device, nvmlDeviceGetEnforcedPowerLimit);
    NEEDS(limit);
    WHOLE_GPU;
    *limit = (unsigned)(1000 * GET(enforced_limit_w, limit_mw(&call) / 1000.0));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t device, unsigned int *limit)
{
    ENTER(device, nvmlDeviceGetPowerManagementDefaultLimit);
    NEEDS(limit);
    WHOLE_GPU;
    *limit = 1000 * call.profile->limit_w;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned int *least,
                                                          unsigned int *most)
{
    ENTER(device, nvmlDeviceGetPowerManagementLimitConstraints);
    NEEDS(least && most);
    WHOLE_GPU;
    *least = 1000 * call.profile->min_limit_w;
    *most = 1000 * call.profile->max_limit_w;
    return NVML_SUCCESS;
}

static unsigned clock_mhz(const call_t *call, nvmlClockType_t type)
{
    const profile_t *profile = call->profile;
    unsigned now = under_load(call) ? profile->clock_busy : profile->clock_idle;
    unsigned graphics = (unsigned)setting(call->row, SET_clock_mhz, now);
    if (type == NVML_CLOCK_MEM)
        return (unsigned)setting(call->row, SET_memory_clock_mhz, profile->clock_memory);
    return type == NVML_CLOCK_VIDEO ? graphics * profile->clock_video_max / profile->clock_max
                                    : graphics;
}

static unsigned max_clock_mhz(const call_t *call, nvmlClockType_t type)
{
    return type == NVML_CLOCK_MEM     ? call->profile->clock_memory
           : type == NVML_CLOCK_VIDEO ? call->profile->clock_video_max
                                      : call->profile->clock_max;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned int *clock)
{
    ENTER(device, nvmlDeviceGetClockInfo);
    NEEDS(clock && type < NVML_CLOCK_COUNT);
    WHOLE_GPU;
    *clock = clock_mhz(&call, type);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type,
                                       unsigned int *clock)
{
    ENTER(device, nvmlDeviceGetMaxClockInfo);
    NEEDS(clock && type < NVML_CLOCK_COUNT);
    WHOLE_GPU;
    *clock = max_clock_mhz(&call, type);
    return NVML_SUCCESS;
}

static nvmlReturn_t performance_state(const call_t *call, nvmlPstates_t *state)
{
    NEEDS(state);
    SUPPORTED(!call->mig);
    *state = (nvmlPstates_t)setting(call->row, SET_performance_state, under_load(call) ? 0 : 8);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPerformanceState(nvmlDevice_t device, nvmlPstates_t *state)
{
    ENTER(device, nvmlDeviceGetPerformanceState);
    return performance_state(&call, state);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device,
                                                    unsigned long long *reasons)
{
    ENTER(device, nvmlDeviceGetCurrentClocksEventReasons);
    NEEDS(reasons);
    WHOLE_GPU;
    *reasons = event_reasons(call.row, monotonic_s());
    return NVML_SUCCESS;
}

/* The name that drivers before 535 have for the same. */
nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device,
                                                       unsigned long long *reasons)
{
    ENTER(device, nvmlDeviceGetCurrentClocksThrottleReasons);
    NEEDS(reasons);
    WHOLE_GPU;
    *reasons = event_reasons(call.row, monotonic_s());
    return NVML_SUCCESS;
}
