/* Utilization and memory. */
#include "fakenvml.h"

unsigned used_mib(const call_t *call)
{
    unsigned used = (unsigned)setting(call->row, SET_memory_used_mib, call->profile->used_mib);
    return call->mig ? used * call->mig->profile->memory_mib / call->profile->memory_mib : used;
}

static unsigned total_mib(const call_t *call)
{
    return call->mig ? call->mig->profile->memory_mib : call->profile->memory_mib;
}

static unsigned reserved_mib(const call_t *call)
{
    unsigned reserved = call->profile->reserved_mib;
    return call->mig ? reserved * call->mig->profile->slices / 8 : reserved;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    ENTER(device, nvmlDeviceGetMemoryInfo_v2);
    NEEDS(memory);
    VERSION(memory, nvmlMemory_v2);
    memory->total = total_mib(&call) * MIB;
    memory->reserved = reserved_mib(&call) * MIB;
    memory->used = used_mib(&call) * MIB;
    memory->free = memory->total - memory->reserved - memory->used;
    return NVML_SUCCESS;
}

/* What is reserved counts as used here. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    ENTER(device, nvmlDeviceGetMemoryInfo);
    NEEDS(memory);
    memory->total = total_mib(&call) * MIB;
    memory->used = (used_mib(&call) + reserved_mib(&call)) * MIB;
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    ENTER(device, nvmlDeviceGetBAR1MemoryInfo);
    NEEDS(memory);
    memory->bar1Total = call.profile->bar1_mib * MIB;
    if (call.mig)
        memory->bar1Total = memory->bar1Total * call.mig->profile->slices / 8;
    memory->bar1Used = (unsigned long long)(GET(bar1_used_mib, 0) * MIB);
    memory->bar1Free = memory->bar1Total - memory->bar1Used;
    return NVML_SUCCESS;
}

/* Refused in MIG mode, for the GPU as for its devices. */
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    ENTER(device, nvmlDeviceGetUtilizationRates);
    NEEDS(utilization);
    SUPPORTED(!call.row->mig_mode);
    utilization->gpu = (unsigned)load_percent(call.row, monotonic_s());
    utilization->memory = (unsigned)GET(memory_load, utilization->gpu / 2);
    return NVML_SUCCESS;
}

static nvmlReturn_t engine(const call_t *call, double per_cent, unsigned *value,
                           unsigned *period_us)
{
    NEEDS(value && period_us);
    SUPPORTED(!call->row->mig_mode);
    *value = (unsigned)per_cent;
    *period_us = 167000;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned int *utilization,
                                             unsigned int *period_us)
{
    ENTER(device, nvmlDeviceGetEncoderUtilization);
    return engine(&call, GET(encoder, 0), utilization, period_us);
}

nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned int *utilization,
                                             unsigned int *period_us)
{
    ENTER(device, nvmlDeviceGetDecoderUtilization);
    return engine(&call, GET(decoder, 0), utilization, period_us);
}

nvmlReturn_t nvmlDeviceGetJpgUtilization(nvmlDevice_t device, unsigned int *utilization,
                                         unsigned int *period_us)
{
    ENTER(device, nvmlDeviceGetJpgUtilization);
    SUPPORTED(call.profile->jpeg_ofa);
    return engine(&call, GET(jpeg, 0), utilization, period_us);
}

nvmlReturn_t nvmlDeviceGetOfaUtilization(nvmlDevice_t device, unsigned int *utilization,
                                         unsigned int *period_us)
{
    ENTER(device, nvmlDeviceGetOfaUtilization);
    SUPPORTED(call.profile->jpeg_ofa);
    return engine(&call, GET(ofa, 0), utilization, period_us);
}
