/* The driver and the list of its GPUs. */
#include "fakenvml.h"

#define ENTER_LIBRARY(function)                                                                    \
    const control_t *now;                                                                          \
    do {                                                                                           \
        nvmlReturn_t at_door = enter_library(&now, F_##function);                                  \
        if (at_door != NVML_SUCCESS)                                                               \
            return at_door;                                                                        \
    } while (0)

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    ENTER_LIBRARY(nvmlSystemGetDriverVersion);
    return write_text(version, length, now->driver_version);
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    char text[80];
    ENTER_LIBRARY(nvmlSystemGetNVMLVersion);
    snprintf(text, sizeof text, "13.%s", now->driver_version);
    return write_text(version, length, text);
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    ENTER_LIBRARY(nvmlSystemGetCudaDriverVersion);
    NEEDS(version);
    *version = 13000;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
    ENTER_LIBRARY(nvmlDeviceGetCount_v2);
    NEEDS(count);
    *count = now->count;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return nvmlDeviceGetCount_v2(count); }

/* Taking a handle touches the GPU, and fails as any other call on it. */
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    const control_t *state = control();
    unsigned row = index < state->count ? state->order[index] : (unsigned)LIBRARY;
    if (row == LIBRARY) {
        ENTER_LIBRARY(nvmlDeviceGetHandleByIndex_v2);
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    ENTER(gpu_handle(row), nvmlDeviceGetHandleByIndex_v2);
    NEEDS(device);
    *device = gpu_handle(row);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

typedef bool (*match_t)(nvmlDevice_t device, const char *text);

static bool has_uuid(nvmlDevice_t device, const char *text)
{
    char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
    return nvmlDeviceGetUUID(device, uuid, sizeof uuid) == NVML_SUCCESS && !strcmp(uuid, text);
}

static bool has_bus_id(nvmlDevice_t device, const char *text)
{
    nvmlPciInfo_t pci;
    unsigned domain, bus, slot;
    return sscanf(text, "%x:%x:%x", &domain, &bus, &slot) == 3 &&
           nvmlDeviceGetPciInfo_v3(device, &pci) == NVML_SUCCESS && pci.domain == domain &&
           pci.bus == bus && pci.device == slot;
}

static nvmlDevice_t find_mig(const control_t *now, unsigned gpu, match_t matches, const char *text)
{
    for (unsigned i = 0; i < now->rows[gpu].mig_count; i++) {
        nvmlDevice_t handle = mig_handle(gpu, &now->rows[gpu].mig[i]);
        if (handle && matches(handle, text))
            return handle;
    }
    return NULL;
}

static nvmlReturn_t find(const control_t *now, match_t matches, const char *text,
                         nvmlDevice_t *device)
{
    NEEDS(text);
    NEEDS(device);
    for (unsigned i = 0; i < now->count; i++) {
        unsigned gpu = now->order[i];
        *device = matches(gpu_handle(gpu), text) ? gpu_handle(gpu)
                  : matches == has_uuid          ? find_mig(now, gpu, matches, text)
                                                 : NULL;
        if (*device)
            return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    ENTER_LIBRARY(nvmlDeviceGetHandleByUUID);
    return find(now, has_uuid, uuid, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    ENTER_LIBRARY(nvmlDeviceGetHandleByPciBusId_v2);
    return find(now, has_bus_id, bus_id, device);
}

nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}
