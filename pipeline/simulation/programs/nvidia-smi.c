/* nvidia-smi, as scripts ask it: its table, `-L`, and `--query-gpu` with `--format=csv[,noheader][,nounits]` and `-i`.
 *
 * What a simulated card does not know is [N/A]; of its processes it knows none. The memory used is what other processes
 * hold, without the training.
 */
#include "card.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PROPERTIES = 64 };

static char is_selected[MAX_CARDS];

/* Print a property of a card, and return whether it is known. */
static int print_property(const char *name, int number) {
    size_t used_mib = card_used(number) / MIB, total_mib = card_model.memory_bytes / MIB;
    if (!strcmp(name, "name") || !strcmp(name, "gpu_name")) printf("%s", card_model.name);
    else if (!strcmp(name, "index")) printf("%d", number);
    else if (!strcmp(name, "count")) printf("%d", card_count);
    else if (!strcmp(name, "uuid") || !strcmp(name, "gpu_uuid")) printf(CARD_UUID, number + 1);
    else if (!strcmp(name, "compute_cap")) printf("%d.%d", card_model.major, card_model.minor);
    else if (!strcmp(name, "driver_version")) printf(CARD_DRIVER);
    else if (!strcmp(name, "memory.total")) printf("%zu", total_mib);
    else if (!strcmp(name, "memory.used")) printf("%zu", used_mib);
    else if (!strcmp(name, "memory.free")) printf("%zu", total_mib - used_mib);
    else if (!strcmp(name, "utilization.gpu") || !strcmp(name, "utilization.memory")) printf("0");
    else return 0;
    return 1;
}

/* Divide a list with commas in place, and return how many words it has. */
static int divide(char *list, char **words, int room) {
    int num_words = 0;
    for (char *word = strtok(list, ", "); word && num_words < room; word = strtok(NULL, ", ")) words[num_words++] = word;
    return num_words;
}

/* Return the card of a number or a UUID; -1 if there is none. */
static int card_called(const char *word) {
    for (int number = 0; number < card_count; number++) {
        char index[16], uuid[64];
        snprintf(index, sizeof index, "%d", number);
        snprintf(uuid, sizeof uuid, CARD_UUID, number + 1);
        if (!strcmp(word, index) || !strcmp(word, uuid)) return number;
    }
    return -1;
}

static void select_cards(char *list) {
    char *words[MAX_CARDS];
    memset(is_selected, 0, sizeof is_selected);
    for (int at = 0, num_words = divide(list, words, MAX_CARDS); at < num_words; at++) {
        int number = card_called(words[at]);
        if (number < 0) {
            printf("No devices were found\n");
            exit(6);
        }
        is_selected[number] = 1;
    }
}

static const char *unit_of(const char *property) {
    return !strncmp(property, "memory.", 7) ? "MiB" : !strncmp(property, "utilization.", 12) ? "%" : NULL;
}

static void print_table(void) {
    printf("NVIDIA-SMI, simulated    Driver Version: " CARD_DRIVER "    CUDA Version: %d.%d\n",
           SIMULATED_CUDA_VERSION / 1000, SIMULATED_CUDA_VERSION % 1000 / 10);
    for (int number = 0; number < card_count; number++) {
        if (!is_selected[number]) continue;
        printf("|  %2d  %-32s | ", number, card_model.name);
        printf("%8zuMiB / %8zuMiB |\n", card_used(number) / MIB, card_model.memory_bytes / MIB);
    }
}

/* The value of an option that may be one word, as `--id=0`, or two. */
static char *value_of(const char *option, char **words) {
    size_t length = strlen(option);
    if (strncmp(words[0], option, length)) return NULL;
    if (words[0][length] == '=') return words[0] + length + 1;
    return words[0][length] ? NULL : words[1];
}

static void print_header(char **properties, int num_properties) {
    for (int i = 0; i < num_properties; i++) {
        printf("%s%s", i ? ", " : "", properties[i]);
        if (unit_of(properties[i])) printf(" [%s]", unit_of(properties[i]));
    }
    printf("\n");
}

static void print_card(char **properties, int num_properties, int number, int has_units) {
    for (int i = 0; i < num_properties; i++) {
        printf("%s", i ? ", " : "");
        if (!print_property(properties[i], number)) printf("[N/A]");
        else if (has_units && unit_of(properties[i])) printf(" %s", unit_of(properties[i]));
    }
    printf("\n");
}

int main(int num_words, char **words) {
    char *properties[MOST_PROPERTIES], *value;
    const char *format = "";
    int num_properties = 0, is_list = 0, asks_else = 0;
    memset(is_selected, 1, card_count);
    for (char **word = words + 1; word < words + num_words; word++) {
        if ((value = value_of("--query-gpu", word))) num_properties = divide(value, properties, MOST_PROPERTIES);
        else if ((value = value_of("--format", word))) format = value;
        else if ((value = value_of("-i", word)) || (value = value_of("--id", word))) select_cards(value);
        else if (!strcmp(*word, "-L") || !strcmp(*word, "--list-gpus")) is_list = 1;
        else if (!strncmp(*word, "--query-", 8)) asks_else = 1;
    }
    if (asks_else) return 0;
    if (num_properties && !strstr(format, "noheader")) print_header(properties, num_properties);
    if (!num_properties && !is_list) print_table();
    for (int number = 0; number < card_count; number++) {
        if (!is_selected[number]) continue;
        if (num_properties) print_card(properties, num_properties, number, !strstr(format, "nounits"));
        else if (is_list) printf("GPU %d: %s (UUID: " CARD_UUID ")\n", number, card_model.name, number + 1);
    }
    return 0;
}
