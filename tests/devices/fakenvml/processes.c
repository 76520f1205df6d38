/* Processes on a device: lists by kind, and what each uses of the multiprocessors. */
#include "fakenvml.h"

static void place_default(const call_t *call, process_t *process)
{
    call_t whole = *call;
    whole.mig = NULL;
    if (call->row->mig_count) { /* it runs in the first of them */
        whole.mig = &call->row->mig[0];
        process->gi = whole.mig->gi;
        process->ci = whole.mig->ci;
    }
    unsigned long long used = used_mib(&whole) * MIB;
    process->memory_bytes = used > 1024 * MIB ? used - 1024 * MIB : used;
}

/* The processes of one kind that a device sees: a MIG device those of its compute instance. */
unsigned list_processes(const call_t *call, char kind, process_t found[MAX_PROCESSES])
{
    unsigned count = 0;
    for (unsigned i = 0; i < call->row->process_count; i++) {
        process_t process = call->row->processes[i];
        if (process.memory_bytes == 0) /* the default process: nearly all that is used */
            place_default(call, &process);
        if ((kind && process.kind != kind) ||
            (call->mig && (process.gi != call->mig->gi || process.ci != call->mig->ci)))
            continue;
        found[count++] = process;
    }
    return count;
}

static nvmlReturn_t list(const call_t *call, char kind, unsigned *count, nvmlProcessInfo_t *infos)
{
    process_t found[MAX_PROCESSES];
    unsigned room = count ? *count : 0;
    NEEDS(count);
    *count = list_processes(call, kind, found);
    REFUSE_IF(*count > (infos ? room : 0), NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < *count; i++)
        infos[i] =
            (nvmlProcessInfo_t){found[i].pid, found[i].memory_bytes, found[i].gi, found[i].ci};
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *infos)
{
    ENTER(device, nvmlDeviceGetComputeRunningProcesses_v3);
    return list(&call, 'C', count, infos);
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                      nvmlProcessInfo_t *infos)
{
    ENTER(device, nvmlDeviceGetGraphicsRunningProcesses_v3);
    return list(&call, 'G', count, infos);
}

nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                        nvmlProcessInfo_t *infos)
{
    ENTER(device, nvmlDeviceGetMPSComputeRunningProcesses_v3);
    return list(&call, 'M', count, infos);
}

/* Version 2 has the same layout. */
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_v2_t *infos)
{
    ENTER(device, nvmlDeviceGetComputeRunningProcesses_v2);
    return list(&call, 'C', count, infos);
}

/* The newest sample of the sensors, shared evenly by the processes; false: nothing new or idle. */
static bool newest(const call_t *call, unsigned long long after_us, sensor_sample_t *sample)
{
    sensor_sample_t samples[SENSOR_SAMPLES];
    unsigned count = sensor_samples(call->gpu, call->row, after_us, samples);
    if (count == 0 || samples[count - 1].gpu < 1)
        return false;
    *sample = samples[count - 1];
    return true;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device,
                                             nvmlProcessUtilizationSample_t *utilization,
                                             unsigned int *count, unsigned long long last_seen)
{
    process_t found[MAX_PROCESSES];
    sensor_sample_t sample;
    ENTER(device, nvmlDeviceGetProcessUtilization);
    NEEDS(count);
    SUPPORTED(!call.row->mig_mode);
    unsigned room = *count;
    *count = list_processes(&call, 0, found);
    REFUSE_IF(*count == 0 || !newest(&call, last_seen, &sample), NVML_ERROR_NOT_FOUND);
    REFUSE_IF(!utilization || room < *count, NVML_ERROR_INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < *count; i++)
        utilization[i] =
            (nvmlProcessUtilizationSample_t){.pid = found[i].pid,
                                             .timeStamp = sample.timestamp_us,
                                             .smUtil = (unsigned)sample.gpu / *count,
                                             .memUtil = (unsigned)sample.memory / *count,
                                             .encUtil = (unsigned)sample.encoder / *count,
                                             .decUtil = (unsigned)sample.decoder / *count};
    return NVML_SUCCESS;
}
