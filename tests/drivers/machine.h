/* The machine that the stub libraries tell of, read from the file that STUB_MACHINE names. One thing a line:
 *
 *   driver VERSION CUDA                   580.95.05 13000
 *   card UUID BUS CAPABILITY MEMORY CORES SMS SPEED MIG NAME...
 *   instance CARD UUID MEMORY SMS NAME... a MIG instance of the card of that number
 *   rule FUNCTION CARD ANSWER             CARD "*" for any; ANSWER a code, or one of the words below
 *
 * Cards stand in NVML's order. SPEED and BUS give CUDA's.
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 16

struct device {
  int card, mig;
  char uuid[80], bus[32], name[96];
  int major, minor, cores, sms, speed;
  unsigned long long memory;
};

struct rule {
  char function[64], card[8], answer[16];
};

static struct device cards[MOST], instances[MOST];
static struct rule rules[MOST];
static int card_count, instance_count, rule_count, cuda_number;
static char driver_version[80];

static void read_machine(void) {
  static int done;
  char line[512];
  FILE *file = done ? NULL : fopen(getenv("STUB_MACHINE"), "r");
  done = 1;
  while (file && fgets(line, sizeof line, file)) {
    struct device *card = &cards[card_count], *instance = &instances[instance_count];
    struct rule *rule = &rules[rule_count];
    if (sscanf(line, "card %79s %31s %d.%d %llu %d %d %d %d %95[^\n]", card->uuid, card->bus, &card->major,
               &card->minor, &card->memory, &card->cores, &card->sms, &card->speed, &card->mig, card->name) == 10) {
      card->card = card_count++;
    } else if (sscanf(line, "instance %d %79s %llu %d %95[^\n]", &instance->card, instance->uuid, &instance->memory,
                      &instance->sms, instance->name) == 5) {
      struct device *parent = &cards[instance->card];
      strcpy(instance->bus, parent->bus);
      instance->major = parent->major, instance->minor = parent->minor;
      instance_count++;
    } else if (sscanf(line, "rule %63s %7s %15s", rule->function, rule->card, rule->answer) == 3) {
      rule_count++;
    } else if (sscanf(line, "driver %79s %d", driver_version, &cuda_number) != 2) {
      fprintf(stderr, "stub: cannot read %s", line);
      abort();
    }
  }
}

/* What the file says a function shall answer for a card (-1: no card): a code, 0 where it says nothing. */
static int ruled(const char *function, int card) {
  read_machine();
  for (int i = 0; i < rule_count; i++) {
    if (strcmp(rules[i].function, function) || (strcmp(rules[i].card, "*") && atoi(rules[i].card) != card)) continue;
    if (!strcmp(rules[i].answer, "hang"))
      for (;;) pause();
    if (!strcmp(rules[i].answer, "crash")) raise(SIGSEGV);
    if (!strcmp(rules[i].answer, "babble"))
      for (;;) fputs("a line that the library prints without end\n", stderr);
    if (!strcmp(rules[i].answer, "helper")) { /* a process that outlives its parent, with all that it has open */
      if (!fork())
        for (;;) pause();
      return 0;
    }
    if (!strcmp(rules[i].answer, "print")) {
      printf("a line that the library prints\n");
      return 0;
    }
    return atoi(rules[i].answer);
  }
  return 0;
}
