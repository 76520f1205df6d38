/* What describes a device and its modes. */
#include "fakenvml.h"

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    char text[64];
    ENTER(device, nvmlDeviceGetUUID);
    if (call.mig)
        snprintf(text, sizeof text, "MIG-00000000-0000-0000-%04u-%06u%06u", call.gpu, call.mig->gi,
                 call.mig->ci);
    else
        snprintf(text, sizeof text, "GPU-00000000-0000-0000-0000-%012u", call.gpu);
    return write_text(uuid, length, text);
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    char text[96], compute[8] = "";
    ENTER(device, nvmlDeviceGetName);
    if (!call.mig)
        return write_text(name, length, call.profile->name);
    if (call.mig->compute_slices != call.mig->profile->slices)
        snprintf(compute, sizeof compute, "%uc.", call.mig->compute_slices);
    snprintf(text, sizeof text, "%s MIG %s%s", call.profile->name, compute,
             call.mig->profile->name);
    return write_text(name, length, text);
}

nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
    ENTER(device, nvmlDeviceGetVbiosVersion);
    WHOLE_GPU;
    return write_text(version, length, call.profile->vbios);
}

nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    char text[NVML_DEVICE_SERIAL_BUFFER_SIZE];
    ENTER(device, nvmlDeviceGetSerial);
    WHOLE_GPU;
    SUPPORTED(call.profile->serial_prefix);
    snprintf(text, sizeof text, "%s%04u", call.profile->serial_prefix, call.gpu);
    return write_text(serial, length, text);
}

nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, nvmlDeviceArchitecture_t *architecture)
{
    ENTER(device, nvmlDeviceGetArchitecture);
    NEEDS(architecture);
    *architecture = call.profile->architecture;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    ENTER(device, nvmlDeviceGetCudaComputeCapability);
    NEEDS(major && minor);
    *major = (int)call.profile->cc_major;
    *minor = (int)call.profile->cc_minor;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    ENTER(device, nvmlDeviceGetIndex);
    NEEDS(index);
    if (call.mig) {
        *index = call.mig->slot;
        return NVML_SUCCESS;
    }
    for (unsigned i = 0; i < call.control->count; i++)
        if (call.control->order[i] == call.gpu) {
            *index = i;
            return NVML_SUCCESS;
        }
    return NVML_ERROR_GPU_IS_LOST;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    ENTER(device, nvmlDeviceGetMinorNumber);
    NEEDS(minor);
    WHOLE_GPU;
    *minor = call.gpu;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER(device, nvmlDeviceGetPersistenceMode);
    NEEDS(mode);
    WHOLE_GPU;
    *mode = FLAG(persistence_mode);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
    ENTER(device, nvmlDeviceGetComputeMode);
    NEEDS(mode);
    *mode = (nvmlComputeMode_t)GET(compute_mode, 0);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t device, nvmlEnableState_t *active)
{
    ENTER(device, nvmlDeviceGetDisplayActive);
    NEEDS(active);
    WHOLE_GPU;
    *active = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t device, nvmlEnableState_t *mode)
{
    ENTER(device, nvmlDeviceGetDisplayMode);
    NEEDS(mode);
    WHOLE_GPU;
    *mode = NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t device, nvmlGpuVirtualizationMode_t *mode)
{
    ENTER(device, nvmlDeviceGetVirtualizationMode);
    NEEDS(mode);
    *mode = NVML_GPU_VIRTUALIZATION_MODE_NONE;
    return NVML_SUCCESS;
}

/* Windows alone has driver models. */
nvmlReturn_t nvmlDeviceGetDriverModel_v2(nvmlDevice_t device, nvmlDriverModel_t *current,
                                         nvmlDriverModel_t *pending)
{
    ENTER(device, nvmlDeviceGetDriverModel_v2);
    (void)current, (void)pending;
    return NVML_ERROR_NOT_SUPPORTED;
}
