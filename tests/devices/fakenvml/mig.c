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
