/* What the files of the library share: the cards of this machine, and what of their memory this process uses.
 *
 * A function answers with CUDA's, NVML's or cuDNN's own types and error codes; those of ours begin with `card_`.
 */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define MIB ((size_t)1 << 20)

/* A function that is another one of the same file, whose parameters are the first of its own: one that a header
 * declares, and one that none does. */
#define ALIAS(NAME, AS) extern __typeof__(NAME) NAME __attribute__((alias(#AS)))
#define NEW_ALIAS(NAME, AS) int NAME() __attribute__((alias(#AS)))

/* Memory of the host, with zeros in it; the process ends where there is none. */
void *card_new(size_t bytes);

/* library.py defines MAX_CARDS, the most that a machine may have. */
struct card {
    char name[96];
    int major, minor; /* the compute capability */
    int num_multiprocessors;
    int clock_mhz, memory_clock_mhz, bus_bits;
    double l2_mib; /* of its second-level cache */
    size_t memory_bytes;
    size_t context_bytes; /* what a CUDA context takes of it */
    size_t others_bytes;  /* what other processes use of it */
};

/* The model of every card, read from the environment when the library is loaded, and how many there are. */
extern struct card card_model;
extern int card_count;

/* A card by its number in the machine, which is what NVML counts; CUDA_VISIBLE_DEVICES changes what CUDA counts. */
int card_num_visible(void);
int card_number(int device);

/* The thread's current device, as CUDA counts. */
int card_current_device(void);

/* Memory of a card, by its number: `card_take` says whether there was room. The first use makes the CUDA context. */
int card_take(int number, size_t bytes);
void card_return(int number, size_t bytes);
size_t card_used(int number);
void card_begin_context(int number);
int card_has_context(int number);

/* Whether the last kernel that this thread launched was that of torch.all. */
int card_was_asked_for_all(void);

/* A kernel was launched, which may write to any memory of a card. */
void card_launched(void);

/* This thread has called a collective of NCCL; the next event that it records is the one behind it. */
void card_begins_collective(void);

/* The card has computed for so long. */
void card_works(int64_t nanoseconds);

/* What is known of the content of a card's memory: written and read by the host, filled with one value, copied within
 * cards. */
void card_write(const void *to, const void *content, size_t bytes);
void card_repeat(const void *to, const void *value, size_t value_bytes, size_t count);
int card_move(const void *to, const void *from, size_t bytes, size_t count); /* count times; whether it is known */
int card_is_page_locked(const void *pointer, size_t bytes); /* by cudaHostAlloc */
void card_read(void *to, const void *from, size_t bytes);

/* The report: how much of a card's memory is used, that a function was called which is not modelled, that a size was
 * asked for which only NVIDIA's library knows, which kernel computes attention, and what a real card would refuse as well,
 * as a sentence goes on that begins with "It". The last four return 0. */
void card_report_use(int number, size_t bytes);
int card_unmodelled(const char *name);
int card_assumed(const char *name, size_t bytes);
int card_attention(const char *kernel);
int card_refused(const char *what);

/* What the driver says of itself, and of a card, with its number plus one. */
#define CARD_DRIVER "simulated"
#define CARD_UUID "GPU-00000000-0000-0000-0000-%012x"

/* A handle of cuBLAS, cuDNN, cuSOLVER or cuSPARSE; torch gives some of them away for larger objects. */
#define CARD_HANDLE_BYTES 512

/* The file of this library. */
const char *card_library(void);
