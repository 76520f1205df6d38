/* Multi-instance GPU: instances as devices, and what they are made of. */
#include "fakenvml.h"

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
    ENTER(device, nvmlDeviceGetMigMode);
    NEEDS(current && pending);
    REFUSE_IF(call.mig, NVML_ERROR_INVALID_ARGUMENT);
    SUPPORTED(call.profile->mig[0].name);
    *current = *pending = call.row->mig_mode;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig)
{
    ENTER(device, nvmlDeviceIsMigDeviceHandle);
    NEEDS(is_mig);
    *is_mig = call.mig != NULL;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
    ENTER(device, nvmlDeviceGetMaxMigDeviceCount);
    NEEDS(count);
    REFUSE_IF(call.mig, NVML_ERROR_INVALID_ARGUMENT);
    *count = call.profile->mig[0].name ? 7 : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index,
                                                 nvmlDevice_t *mig_device)
{
    ENTER(device, nvmlDeviceGetMigDeviceHandleByIndex);
    NEEDS(mig_device && !call.mig && index < 7);
    SUPPORTED(call.profile->mig[0].name);
    for (unsigned i = 0; i < call.row->mig_count; i++)
        if (call.row->mig[i].slot == index) {
            *mig_device = mig_handle(call.gpu, &call.row->mig[i]);
            return *mig_device ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_RESOURCES;
        }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig_device,
                                                          nvmlDevice_t *device)
{
    ENTER(mig_device, nvmlDeviceGetDeviceHandleFromMigDeviceHandle);
    NEEDS(device && call.mig);
    *device = gpu_handle(call.gpu);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER(device, nvmlDeviceGetGpuInstanceId);
    NEEDS(id && call.mig);
    *id = call.mig->gi;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
    ENTER(device, nvmlDeviceGetComputeInstanceId);
    NEEDS(id && call.mig);
    *id = call.mig->ci;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    ENTER(device, nvmlDeviceGetAttributes_v2);
    NEEDS(attributes);
    SUPPORTED(call.mig);
    const mig_profile_t *profile = call.mig->profile;
    *attributes =
        (nvmlDeviceAttributes_t){.multiprocessorCount = profile->multiprocessors *
                                                        call.mig->compute_slices / profile->slices,
                                 .sharedCopyEngineCount = profile->copy_engines,
                                 .sharedDecoderCount = profile->decoders,
                                 .gpuInstanceSliceCount = profile->slices,
                                 .computeInstanceSliceCount = call.mig->compute_slices,
                                 .memorySizeMB = profile->memory_mib};
    return NVML_SUCCESS;
}

/* GPU instances: their profiles, and which of them exist */

struct nvmlGpuInstance_st {
    unsigned gpu, id;
};

enum { MAX_GPU_INSTANCES = 16 };
static struct nvmlGpuInstance_st instances[MAX_GPUS][MAX_GPU_INSTANCES];

static nvmlGpuInstance_t instance_handle(unsigned gpu, unsigned id)
{
    instances[gpu][id] = (struct nvmlGpuInstance_st){gpu, id};
    return &instances[gpu][id];
}

static const mig_t *first_of_instance(const gpu_control_t *row, unsigned id)
{
    for (unsigned i = 0; i < row->mig_count; i++)
        if (row->mig[i].gi == id && id < MAX_GPU_INSTANCES)
            return &row->mig[i];
    return NULL;
}

static const mig_profile_t *profile_numbered(const call_t *call, unsigned number)
{
    if (call->row->mig_mode)
        for (unsigned i = 0; i < MAX_MIG_PROFILES && call->profile->mig[i].name; i++)
            if (call->profile->mig[i].profile == number)
                return &call->profile->mig[i];
    return NULL;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int number,
                                                 nvmlGpuInstanceProfileInfo_t *info)
{
    ENTER(device, nvmlDeviceGetGpuInstanceProfileInfo);
    NEEDS(info && !call.mig && number < NVML_GPU_INSTANCE_PROFILE_COUNT);
    const mig_profile_t *profile = profile_numbered(&call, number);
    SUPPORTED(profile);
    *info = (nvmlGpuInstanceProfileInfo_t){.id = profile->id,
                                           .sliceCount = profile->slices,
                                           .instanceCount = profile->instances,
                                           .multiprocessorCount = profile->multiprocessors,
                                           .copyEngineCount = profile->copy_engines,
                                           .decoderCount = profile->decoders,
                                           .memorySizeMB = profile->memory_mib};
    return NVML_SUCCESS;
}

/* Version 3 has another layout behind the same pointer. */
nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int number,
                                                  nvmlGpuInstanceProfileInfo_v2_t *info)
{
    ENTER(device, nvmlDeviceGetGpuInstanceProfileInfoV);
    NEEDS(info && !call.mig && number < NVML_GPU_INSTANCE_PROFILE_COUNT);
    bool third = info->version == nvmlGpuInstanceProfileInfo_v3;
    REFUSE_IF(!third && info->version != nvmlGpuInstanceProfileInfo_v2,
              NVML_ERROR_INVALID_ARGUMENT);
    const mig_profile_t *profile = profile_numbered(&call, number);
    SUPPORTED(profile);
    nvmlGpuInstanceProfileInfo_v3_t *info_v3 = (void *)info;
    if (third)
        *info_v3 =
            (nvmlGpuInstanceProfileInfo_v3_t){.version = info->version,
                                              .id = profile->id,
                                              .sliceCount = profile->slices,
                                              .instanceCount = profile->instances,
                                              .multiprocessorCount = profile->multiprocessors,
                                              .copyEngineCount = profile->copy_engines,
                                              .decoderCount = profile->decoders,
                                              .memorySizeMB = profile->memory_mib};
    else
        *info = (nvmlGpuInstanceProfileInfo_v2_t){.version = info->version,
                                                  .id = profile->id,
                                                  .sliceCount = profile->slices,
                                                  .instanceCount = profile->instances,
                                                  .multiprocessorCount = profile->multiprocessors,
                                                  .copyEngineCount = profile->copy_engines,
                                                  .decoderCount = profile->decoders,
                                                  .memorySizeMB = profile->memory_mib};
    snprintf(third ? info_v3->name : info->name, sizeof info->name, "MIG %s", profile->name);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int profile_id,
                                       nvmlGpuInstance_t *found, unsigned int *count)
{
    ENTER(device, nvmlDeviceGetGpuInstances);
    NEEDS(found && count && !call.mig);
    SUPPORTED(call.row->mig_mode);
    *count = 0;
    for (unsigned id = 0; id < MAX_GPU_INSTANCES; id++) {
        const mig_t *mig = first_of_instance(call.row, id);
        if (mig && mig->profile->id == profile_id)
            found[(*count)++] = instance_handle(call.gpu, id);
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id,
                                          nvmlGpuInstance_t *instance)
{
    ENTER(device, nvmlDeviceGetGpuInstanceById);
    NEEDS(instance && !call.mig);
    SUPPORTED(call.row->mig_mode);
    REFUSE_IF(!first_of_instance(call.row, id), NVML_ERROR_NOT_FOUND);
    *instance = instance_handle(call.gpu, id);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    uintptr_t at = (uintptr_t)instance - (uintptr_t)instances;
    NEEDS(info && at < sizeof instances && at % sizeof **instances == 0);
    ENTER(gpu_handle(instance->gpu), nvmlGpuInstanceGetInfo);
    const mig_t *mig = first_of_instance(call.row, instance->id);
    NEEDS(mig);
    *info = (nvmlGpuInstanceInfo_t){.device = gpu_handle(call.gpu),
                                    .id = mig->gi,
                                    .profileId = mig->profile->id,
                                    .placement = {mig->gi % 8, mig->profile->slices}};
    return NVML_SUCCESS;
}
