/* ECC, row remapping, retired pages. */
#include "fakenvml.h"

static bool ecc_mode(const call_t *call)
{
    return setting(call->row, SET_ecc_mode, call->profile->ecc_on) != 0;
}

bool ecc_is_on(const call_t *call) { return call->profile->ecc && ecc_mode(call); }

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, nvmlEnableState_t *current,
                                  nvmlEnableState_t *pending)
{
    ENTER(device, nvmlDeviceGetEccMode);
    NEEDS(current && pending);
    WHOLE_GPU;
    SUPPORTED(call.profile->ecc);
    *current = ecc_mode(&call);
    *pending = GET(ecc_pending, *current) != 0;
    return NVML_SUCCESS;
}

static unsigned long long in_dram(const call_t *call, nvmlMemoryErrorType_t type,
                                  nvmlEccCounterType_t counter)
{
    static const setting_t names[2][2] = {{SET_ecc_corrected, SET_ecc_corrected_aggregate},
                                          {SET_ecc_uncorrected, SET_ecc_uncorrected_aggregate}};
    return (unsigned long long)call->row->settings[names[type][counter]];
}

static unsigned long long in_sram(const call_t *call, nvmlMemoryErrorType_t type)
{
    return type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED
               ? (unsigned long long)call->row->settings[SET_sram_uncorrected]
               : 0;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                         nvmlEccCounterType_t counter, unsigned long long *count)
{
    ENTER(device, nvmlDeviceGetTotalEccErrors);
    NEEDS(count && type < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT);
    WHOLE_GPU;
    SUPPORTED(ecc_is_on(&call));
    *count = in_dram(&call, type, counter) + in_sram(&call, type);
    return NVML_SUCCESS;
}

/* GPUs with row remapping tell DRAM from SRAM; the older ones name each memory. */
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, nvmlMemoryErrorType_t type,
                                             nvmlEccCounterType_t counter,
                                             nvmlMemoryLocation_t location,
                                             unsigned long long *count)
{
    ENTER(device, nvmlDeviceGetMemoryErrorCounter);
    NEEDS(count && type < NVML_MEMORY_ERROR_TYPE_COUNT && counter < NVML_ECC_COUNTER_TYPE_COUNT);
    WHOLE_GPU;
    SUPPORTED(ecc_is_on(&call));
    bool is_sram = location == NVML_MEMORY_LOCATION_SRAM;
    bool is_dram = location == NVML_MEMORY_LOCATION_DRAM;
    SUPPORTED(is_dram || (call.profile->row_banks ? is_sram : !is_sram));
    *count = is_dram ? in_dram(&call, type, counter) : is_sram ? in_sram(&call, type) : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device,
                                               nvmlRowRemapperHistogramValues_t *values)
{
    ENTER(device, nvmlDeviceGetRowRemapperHistogram);
    NEEDS(values);
    SUPPORTED(call.profile->row_banks && call.row->mig_count == 0);
    unsigned used = (unsigned)(GET(remapped_correctable, 0) + GET(remapped_uncorrectable, 0));
    unsigned none = FLAG(remap_failure) ? 1 : 0;
    *values = (nvmlRowRemapperHistogramValues_t){
        .max = call.profile->row_banks - used - none, .high = used, .none = none};
    return NVML_SUCCESS;
}
