/* As much of libcuda.so.1 as kernelreg asks for. It numbers the cards as CUDA does: the fastest first, or by their bus
 * under CUDA_DEVICE_ORDER=PCI_BUS_ID; of cards with MIG one instance alone and then no other card; and it reads
 * CUDA_VISIBLE_DEVICES as torch does, whose reader was compared with a real driver's. */
#include "machine.h"

#define ANSWER(card)                     \
  do {                                   \
    int code = ruled(__func__, card);    \
    if (code) return code;               \
  } while (0)

/* What the loader runs. */
__attribute__((constructor)) static void loadCuda(void) { ruled(__func__, -1); }

static struct device *ordered[MOST], *shown[MOST];
static int shown_count;

static int compare(const void *one, const void *two) {
  const struct device *a = *(struct device *const *)one, *b = *(struct device *const *)two;
  const char *order = getenv("CUDA_DEVICE_ORDER");
  int by_bus = order && !strcmp(order, "PCI_BUS_ID");
  return !by_bus && a->speed != b->speed ? b->speed - a->speed : strcmp(a->bus, b->bus);
}

static struct device *first_instance(struct device *card) {
  for (int i = 0; i < instance_count; i++)
    if (instances[i].card == card->card) return &instances[i];
  return NULL;
}

static struct device *named(const char *entry, size_t length) {
  struct device *found = NULL;
  for (int i = 0; i < card_count + instance_count; i++) {
    struct device *each = i < card_count ? &cards[i] : &instances[i - card_count];
    if (strncmp(each->uuid, entry, length)) continue;
    if (found) return NULL;
    found = each;
  }
  return found;
}

/* Whether the device is there to be shown, as itself or as its first instance. */
static int show(struct device *device) {
  if (device && device->mig == 1) device = first_instance(device);
  if (!device) return 0;
  for (int i = 0; i < shown_count; i++)
    if (shown[i] == device) {
      shown_count = 0;
      return 0;
    }
  shown[shown_count++] = device;
  return 1;
}

static void number_devices(void) {
  const char *entry = getenv("CUDA_VISIBLE_DEVICES");
  char kind = 0;
  for (int i = 0; i < card_count; i++) ordered[i] = &cards[i];
  qsort(ordered, card_count, sizeof *ordered, compare);
  if (!entry)
    for (int i = 0; i < card_count; i++) show(ordered[i]);
  for (int more = entry != NULL; more;) {
    size_t length = strcspn(entry, ",");
    char *end, this_kind = *entry == 'G' || *entry == 'M' ? *entry : '#';
    long index = strtol(entry, &end, 10);
    if (kind && kind != this_kind) break;
    kind = this_kind;
    if (kind != '#' && !show(named(entry, length))) break;
    if (kind == '#' && (end == entry || index < 0 || index >= card_count || !show(ordered[index]))) break;
    more = entry[length] == ',';
    entry += length + 1;
  }
  for (int i = 0; i < shown_count; i++)
    if (strncmp(shown[i]->uuid, "MIG-", 4) == 0) {
      shown[0] = shown[i];
      shown_count = 1;
    }
}

int cuInit(unsigned flags) {
  (void)flags;
  ANSWER(-1);
  number_devices();
  return shown_count ? 0 : 100;
}
int cuDriverGetVersion(int *version) {
  ANSWER(-1);
  *version = cuda_number;
  return 0;
}
int cuDeviceGetCount(int *count) {
  ANSWER(-1);
  *count = shown_count;
  return 0;
}
int cuDeviceGet(int *device, int index) {
  ANSWER(shown[index]->card);
  *device = index;
  return 0;
}
int cuDeviceGetName(char *text, int size, int device) {
  ANSWER(shown[device]->card);
  strncpy(text, shown[device]->name, size);
  return 0;
}
int cuDeviceTotalMem_v2(size_t *size, int device) {
  ANSWER(shown[device]->card);
  *size = shown[device]->memory - 1; /* NVML counts more than a process can have */
  return 0;
}
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  ANSWER(shown[device]->card);
  unsigned byte, count = 0;
  for (const char *digit = shown[device]->uuid + 4; *digit && count < 16; digit++)
    if (*digit != '-' && sscanf(digit, "%2x", &byte) == 1) uuid[count++] = byte, digit++;
  return 0;
}
int cuDeviceGetUuid(unsigned char *uuid, int device) { return cuDeviceGetUuid_v2(uuid, device); }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  struct device *of = shown[device];
  unsigned domain, bus, slot;
  ANSWER(of->card);
  sscanf(of->bus, "%x:%x:%x", &domain, &bus, &slot);
  switch (attribute) {
    case 16: *value = of->sms; return 0;
    case 33: *value = bus; return 0;
    case 34: *value = slot; return 0;
    case 50: *value = domain; return 0;
    case 75: *value = of->major; return 0;
    case 76: *value = of->minor; return 0;
  }
  return 1;
}
int cuGetErrorString(int code, const char **text) {
  (void)code;
  *text = "the stub's error";
  return 0;
}
