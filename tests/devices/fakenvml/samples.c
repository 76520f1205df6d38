/* The driver's sample buffers: what its sensors said in the last 20 seconds. */
#include "fakenvml.h"

static unsigned value_of(const sensor_sample_t *sample, nvmlSamplingType_t type, const call_t *call)
{
    switch (type) {
    case NVML_TOTAL_POWER_SAMPLES: return (unsigned)(1000 * sample->power_w);
    case NVML_GPU_UTILIZATION_SAMPLES: return (unsigned)(sample->gpu + 0.5F);
    case NVML_MEMORY_UTILIZATION_SAMPLES: return (unsigned)(sample->memory + 0.5F);
    case NVML_ENC_UTILIZATION_SAMPLES: return (unsigned)(sample->encoder + 0.5F);
    case NVML_DEC_UTILIZATION_SAMPLES: return (unsigned)(sample->decoder + 0.5F);
    case NVML_JPG_UTILIZATION_SAMPLES: return (unsigned)(sample->jpeg + 0.5F);
    case NVML_OFA_UTILIZATION_SAMPLES: return (unsigned)(sample->ofa + 0.5F);
    case NVML_PROCESSOR_CLK_SAMPLES:
        return (unsigned)setting(call->row, SET_clock_mhz,
                                 sample->gpu < 1 ? call->profile->clock_idle
                                                 : call->profile->clock_busy);
    default: return (unsigned)setting(call->row, SET_memory_clock_mhz, call->profile->clock_memory);
    }
}

static bool has_samples(const call_t *call, nvmlSamplingType_t type)
{
    bool of_instances =
        type >= NVML_GPU_UTILIZATION_SAMPLES && type <= NVML_DEC_UTILIZATION_SAMPLES;
    bool of_jpeg_ofa = type >= NVML_JPG_UTILIZATION_SAMPLES;
    if (type == NVML_MODULE_POWER_SAMPLES || call->mig)
        return false;
    if ((of_instances || of_jpeg_ofa) && call->row->mig_mode)
        return false;
    return !of_jpeg_ofa || call->profile->jpeg_ofa;
}

/* Oldest first; where the caller has too little room the newest wait for the next call. */
nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, nvmlSamplingType_t type,
                                  unsigned long long last_seen, nvmlValueType_t *value_type,
                                  unsigned int *count, nvmlSample_t *samples)
{
    sensor_sample_t found[SENSOR_SAMPLES];
    ENTER(device, nvmlDeviceGetSamples);
    NEEDS(value_type && count && type < NVML_SAMPLINGTYPE_COUNT && (!samples || *count));
    SUPPORTED(has_samples(&call, type));
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (!samples) {
        *count = SENSOR_SAMPLES;
        return NVML_SUCCESS;
    }
    unsigned fresh = sensor_samples(call.gpu, call.row, last_seen, found);
    REFUSE_IF(fresh == 0, NVML_ERROR_NOT_FOUND);
    *count = fresh < *count ? fresh : *count;
    for (unsigned i = 0; i < *count; i++) {
        samples[i] = (nvmlSample_t){.timeStamp = found[i].timestamp_us};
        samples[i].sampleValue.uiVal = value_of(&found[i], type, &call);
    }
    return NVML_SUCCESS;
}
