/* GPU performance monitoring: means between two samples, of whole GPUs and of MIG instances. */
#include "fakenvml.h"

struct nvmlGpmSample_st {
    bool taken;
    unsigned gpu, gi;
    const profile_t *profile;
    motion_t motion;
    double sentinel; /* NAN: no metric has a value */
};

/* What a load of 100 % makes of each metric, in per cent. */
static const struct {
    unsigned metric;
    double per_cent;
} shares[] = {
    {NVML_GPM_METRIC_GRAPHICS_UTIL, 100},   {NVML_GPM_METRIC_SM_UTIL, 90},
    {NVML_GPM_METRIC_SM_OCCUPANCY, 40},     {NVML_GPM_METRIC_INTEGER_UTIL, 10},
    {NVML_GPM_METRIC_ANY_TENSOR_UTIL, 50},  {NVML_GPM_METRIC_DFMA_TENSOR_UTIL, 1},
    {NVML_GPM_METRIC_HMMA_TENSOR_UTIL, 44}, {NVML_GPM_METRIC_IMMA_TENSOR_UTIL, 5},
    {NVML_GPM_METRIC_DRAM_BW_UTIL, 30},     {NVML_GPM_METRIC_FP64_UTIL, 2},
    {NVML_GPM_METRIC_FP32_UTIL, 20},        {NVML_GPM_METRIC_FP16_UTIL, 6},
};

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
    ENTER(device, nvmlGpmQueryDeviceSupport);
    NEEDS(support);
    REFUSE_IF(support->version != NVML_GPM_SUPPORT_VERSION, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    support->isSupportedDevice = call.profile->gpm;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
    const control_t *now;
    nvmlReturn_t code = enter_library(&now, F_nvmlGpmSampleAlloc);
    REFUSE_IF(code != NVML_SUCCESS, code);
    NEEDS(sample);
    *sample = calloc(1, sizeof **sample);
    return *sample ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
    const control_t *now;
    nvmlReturn_t code = enter_library(&now, F_nvmlGpmSampleFree);
    NEEDS(sample);
    free(sample);
    return code;
}

static void take(const call_t *call, unsigned gi, nvmlGpmSample_t sample)
{
    *sample = (struct nvmlGpmSample_st){.taken = true,
                                        .gpu = call->gpu,
                                        .gi = gi,
                                        .profile = call->profile,
                                        .motion = move(call->gpu, call->row)};
    if (call->row->settings[SET_sentinels] != 0)
        sample->sentinel = NAN;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
    ENTER(device, nvmlGpmSampleGet);
    NEEDS(sample);
    WHOLE_GPU;
    /* In MIG mode only its instances have counters. */
    SUPPORTED(call.profile->gpm && !call.row->mig_mode);
    take(&call, NO_INSTANCE, sample);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int gi, nvmlGpmSample_t sample)
{
    ENTER(device, nvmlGpmMigSampleGet);
    NEEDS(sample && !call.mig);
    SUPPORTED(call.profile->gpm && call.row->mig_mode);
    for (unsigned i = 0; i < call.row->mig_count; i++)
        if (call.row->mig[i].gi == gi) {
            take(&call, gi, sample);
            return NVML_SUCCESS;
        }
    return NVML_ERROR_INVALID_ARGUMENT;
}

/* MiB/s on the links; an instance has none of its own. */
static nvmlReturn_t traffic(const struct nvmlGpmSample_st *of, const motion_t *passed,
                            nvmlGpmMetric_t *metric)
{
    bool pcie = metric->metricId <= NVML_GPM_METRIC_PCIE_RX_PER_SEC;
    unsigned links = of->profile->nvlinks;
    unsigned link = (metric->metricId - NVML_GPM_METRIC_NVLINK_L0_RX_PER_SEC) / 2;
    bool of_one_link = metric->metricId >= NVML_GPM_METRIC_NVLINK_L0_RX_PER_SEC;
    SUPPORTED(of->gi == NO_INSTANCE && (pcie || (links && (!of_one_link || link < links))));
    double mib = pcie ? pcie_bytes(passed) / MIB : nvlink_kib(passed) / 1024;
    metric->value = mib / passed->at_s / (of_one_link ? links : 1);
    metric->metricInfo.unit = "MiB/s";
    return NVML_SUCCESS;
}

static nvmlReturn_t mean(const struct nvmlGpmSample_st *of, const motion_t *passed,
                         nvmlGpmMetric_t *metric)
{
    unsigned id = metric->metricId;
    bool pcie = id == NVML_GPM_METRIC_PCIE_TX_PER_SEC || id == NVML_GPM_METRIC_PCIE_RX_PER_SEC;
    if (pcie || (id >= NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC &&
                 id <= NVML_GPM_METRIC_NVLINK_L17_TX_PER_SEC))
        return traffic(of, passed, metric);
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++)
        if (shares[i].metric == id) {
            metric->value = shares[i].per_cent * passed->load_s / passed->at_s;
            metric->metricInfo.unit = "%";
            return NVML_SUCCESS;
        }
    return NVML_ERROR_NOT_SUPPORTED;
}

static bool comparable(nvmlGpmSample_t one, nvmlGpmSample_t other)
{
    return one->taken && other->taken && one->gpu == other->gpu && one->gi == other->gi &&
           other->motion.at_s > one->motion.at_s;
}

/* Counted for the GPU of the samples, so that it can fail or hang for one GPU alone. */
nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get)
{
    NEEDS(get && get->sample1 && get->sample2);
    ENTER(gpu_handle(get->sample2->gpu), nvmlGpmMetricsGet);
    REFUSE_IF(get->version != NVML_GPM_METRICS_GET_VERSION, NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    NEEDS(comparable(get->sample1, get->sample2));
    const motion_t *from = &get->sample1->motion, *to = &get->sample2->motion;
    motion_t passed = {.at_s = to->at_s - from->at_s, .load_s = to->load_s - from->load_s};
    for (unsigned i = 0; i < get->numMetrics; i++) {
        nvmlGpmMetric_t *metric = &get->metrics[i];
        metric->metricInfo.shortName = metric->metricInfo.longName = metric->metricInfo.unit = "";
        metric->value = 0;
        metric->nvmlReturn = mean(get->sample2, &passed, metric);
        metric->value += get->sample2->sentinel;
    }
    return NVML_SUCCESS;
}
