/* What nvidia-ml-py 13 knows and the header of CUDA 12.9 does not yet. */
#ifndef NEWER_H
#define NEWER_H

#include <nvml.h>

typedef struct {
    unsigned int version;
    unsigned char clusterUuid[NVML_GPU_FABRIC_UUID_LEN];
    nvmlReturn_t status;
    unsigned int cliqueId;
    nvmlGpuFabricState_t state;
    unsigned int healthMask;
    unsigned char healthSummary;
} nvmlGpuFabricInfo_v3_t;
#define nvmlGpuFabricInfo_v3 NVML_STRUCT_VERSION(GpuFabricInfo, 3)

enum { FABRIC_HEALTHY = 1 };

/* The header has these three at 251-253, where drivers before 580 have them too. */
enum { SW_THERMAL_FIELD = 269, POWER_BRAKE_FIELD = 271, OLD_SW_THERMAL_FIELD = 251 };

#endif
