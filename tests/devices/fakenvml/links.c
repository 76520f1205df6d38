/* PCIe and NVLink, and how the GPUs are connected. */
#include "fakenvml.h"
#include "newer.h"

enum { FIRST_BUS = 0x18 };

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    ENTER(device, nvmlDeviceGetPciInfo_v3);
    NEEDS(pci);
    *pci = (nvmlPciInfo_t){.bus = FIRST_BUS + call.gpu,
                           .pciDeviceId = call.profile->pci_device,
                           .pciSubSystemId = call.profile->pci_subsystem};
    snprintf(pci->busId, sizeof pci->busId, NVML_DEVICE_PCI_BUS_ID_FMT,
             NVML_DEVICE_PCI_BUS_ID_FMT_ARGS(pci));
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", pci->bus & 0xFF);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation)
{
    ENTER(device, nvmlDeviceGetCurrPcieLinkGeneration);
    NEEDS(generation);
    WHOLE_GPU;
    *generation = (unsigned)GET(pcie_generation, call.profile->pcie_generation);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned int *generation)
{
    ENTER(device, nvmlDeviceGetMaxPcieLinkGeneration);
    NEEDS(generation);
    WHOLE_GPU;
    *generation = call.profile->pcie_generation;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned int *width)
{
    ENTER(device, nvmlDeviceGetCurrPcieLinkWidth);
    NEEDS(width);
    WHOLE_GPU;
    *width = (unsigned)GET(pcie_width, call.profile->pcie_width);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned int *width)
{
    ENTER(device, nvmlDeviceGetMaxPcieLinkWidth);
    NEEDS(width);
    WHOLE_GPU;
    *width = call.profile->pcie_width;
    return NVML_SUCCESS;
}

/* KB/s over the 20 ms that the call takes. */
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter,
                                         unsigned int *throughput)
{
    motion_t full = {.load_s = 1};
    ENTER(device, nvmlDeviceGetPcieThroughput);
    NEEDS(throughput && counter < NVML_PCIE_UTIL_COUNT);
    WHOLE_GPU;
    *throughput =
        (unsigned)(pcie_bytes(&full) / 1000 * load_percent(call.row, monotonic_s()) / 100);
    return NVML_SUCCESS;
}

/* NVLink */

bool link_active(const call_t *call, unsigned link)
{
    unsigned down = (unsigned)call->row->settings[SET_nvlinks_down];
    return link < call->profile->nvlinks && !(down >> link & 1);
}

#define HAS_LINK(link)                                                                             \
    do {                                                                                           \
        WHOLE_GPU;                                                                                 \
        NEEDS((link) < MAX_LINKS);                                                                 \
        SUPPORTED((link) < call.profile->nvlinks);                                                 \
    } while (0)

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int link,
                                      nvmlEnableState_t *active)
{
    ENTER(device, nvmlDeviceGetNvLinkState);
    NEEDS(active);
    HAS_LINK(link);
    *active = link_active(&call, link);
    return NVML_SUCCESS;
}

/* Version 3 begins as version 2 does. */
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info)
{
    ENTER(device, nvmlDeviceGetGpuFabricInfoV);
    NEEDS(info);
    unsigned version = info->version;
    REFUSE_IF(version != nvmlGpuFabricInfo_v2 && version != nvmlGpuFabricInfo_v3,
              NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
    SUPPORTED(call.profile->fabric);
    *info = (nvmlGpuFabricInfoV_t){
        .version = version,
        .status = NVML_SUCCESS,
        .state = (nvmlGpuFabricState_t)GET(fabric_state, NVML_GPU_FABRIC_STATE_COMPLETED),
        .healthMask = NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_FALSE};
    memset(info->clusterUuid, 0x5A, sizeof info->clusterUuid);
    if (version == nvmlGpuFabricInfo_v3)
        ((nvmlGpuFabricInfo_v3_t *)info)->healthSummary = FABRIC_HEALTHY;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t device, nvmlDevice_t other,
                                    nvmlGpuP2PCapsIndex_t capability, nvmlGpuP2PStatus_t *status)
{
    call_t peer;
    ENTER(device, nvmlDeviceGetP2PStatus);
    NEEDS(status && capability < NVML_P2P_CAPS_INDEX_UNKNOWN && on_gpu(&peer, other));
    *status = call.profile->nvlinks ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED;
    return NVML_SUCCESS;
}
