/* As much of libnvidia-ml.so.1 as nvidia-ml-py and torch ask for. */
#include "machine.h"

#define ANSWER(card)                     \
  do {                                   \
    int code = ruled(__func__, card);    \
    if (code) return code;               \
  } while (0)

/* What the loader runs. */
__attribute__((constructor)) static void loadNvml(void) { ruled(__func__, -1); }

typedef struct device *handle;

static char *put(char *target, const char *text, unsigned size) {
  return strncpy(target, text, size);
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  ANSWER(-1);
  return 0;
}
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
  ANSWER(-1);
  return 0;
}
const char *nvmlErrorString(int code) {
  (void)code;
  return "stub error";
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
  ANSWER(-1);
  put(text, driver_version, size);
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  ANSWER(-1);
  *version = cuda_number;
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
  ANSWER(-1);
  *count = card_count;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, handle *device) {
  ANSWER(index);
  *device = &cards[index];
  return 0;
}
int nvmlDeviceGetName(handle device, char *text, unsigned size) {
  ANSWER(device->card);
  put(text, device->name, size);
  return 0;
}
int nvmlDeviceGetUUID(handle device, char *text, unsigned size) {
  ANSWER(device->card);
  put(text, device->uuid, size);
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(handle device, int *major, int *minor) {
  ANSWER(device->card);
  *major = device->major, *minor = device->minor;
  return 0;
}
int nvmlDeviceGetPciInfo_v3(handle device, void *info) {
  struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
  } *pci = info;
  ANSWER(device->card);
  put(pci->bus_id, device->bus, sizeof pci->bus_id);
  return 0;
}
int nvmlDeviceGetMemoryInfo(handle device, unsigned long long *memory) {
  ANSWER(device->card);
  memory[0] = device->memory;
  return 0;
}
int nvmlDeviceGetNumGpuCores(handle device, unsigned *count) {
  ANSWER(device->card);
  *count = device->cores;
  return 0;
}
int nvmlDeviceGetMigMode(handle device, unsigned *current, unsigned *pending) {
  ANSWER(device->card);
  if (device->mig < 0) return 3; /* a card that knows no MIG */
  *current = *pending = device->mig;
  return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(handle device, unsigned *count) {
  ANSWER(device->card);
  *count = 7;
  return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(handle device, unsigned index, handle *instance) {
  ANSWER(device->card);
  for (int i = 0; i < instance_count; i++)
    if (instances[i].card == device->card && !index--) {
      *instance = &instances[i];
      return 0;
    }
  return 6;
}
int nvmlDeviceGetAttributes_v2(handle device, unsigned *attributes) {
  ANSWER(device->card);
  attributes[0] = device->sms;
  return 0;
}
