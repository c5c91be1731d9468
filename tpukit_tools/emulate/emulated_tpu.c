/* A TPU that is not there: a library that torch_xla loads as libtpu.
 *
 * XLA's CPU plugin computes. Before it stand a TPU's names, one process a chip, chips that are busy while a
 * process holds them, HBM that is counted, and collectives between the processes: each one of a program
 * becomes a custom call of XLA's typed FFI, which meets the other processes in files of a common folder. So a
 * chip's program has one replica, and programs may differ by chip as on a TPU. N chips cost N times one, but
 * that a program is compiled once.
 *
 * In each process, the plugin's device 0 is the process's own chip, whatever its number. A process without
 * TPU_PROCESS_BOUNDS owns all chips; then it may use SPMD, whose collectives are the plugin's own.
 *
 * Declared here is the part of PJRT's and the FFI's C interfaces (the OpenXLA authors, Apache-2.0) that
 * this file uses. A call is its place in PJRT_Api; the plugin checks the size of each argument struct. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* PJRT */

typedef void Error, Device, Executable, Buffer, Event;
typedef struct Extension { size_t size; int type; struct Extension *next; } Extension;
typedef Error *(*Call)(void *);
typedef struct {
  size_t size;
  Extension *extensions;
  struct { size_t size; Extension *extensions; int major, minor; } version;
  Call call[];
} Api;

enum { /* places in Api.call */
  ERROR_DESTROY = 0, ERROR_MESSAGE, ERROR_GET_CODE, PLUGIN_ATTRIBUTES = 4, EVENT_DESTROY, EVENT_ON_READY = 9,
  CLIENT_CREATE,
  CLIENT_PLATFORM_NAME = 12, CLIENT_PROCESS_INDEX, CLIENT_DEVICES = 15, CLIENT_ADDRESSABLE_DEVICES,
  CLIENT_LOOKUP_DEVICE, CLIENT_LOOKUP_ADDRESSABLE_DEVICE, CLIENT_ADDRESSABLE_MEMORIES, CLIENT_COMPILE,
  CLIENT_BUFFER_FROM_HOST = 22, DESCRIPTION_ID, DESCRIPTION_PROCESS_INDEX, DESCRIPTION_KIND = 26,
  DEVICE_IS_ADDRESSABLE = 30, DEVICE_ADDRESSABLE_MEMORIES = 32, DEVICE_MEMORY_STATS = 34,
  EXECUTABLE_DESTROY = 40,
  EXECUTABLE_NUM_OUTPUTS = 44, EXECUTABLE_SERIALIZE = 49, LOADED_DESTROY, LOADED_GET_EXECUTABLE,
  LOADED_EXECUTE = 55, EXECUTABLE_DESERIALIZE,
  BUFFER_DESTROY = 58, BUFFER_SIZE = 64, BUFFER_DEVICE, BUFFER_DELETE = 67, BUFFER_IS_DELETED,
  BUFFER_COPY_TO_DEVICE, BUFFER_COPY_TO_MEMORY = 92, EXECUTABLE_MEMORY = 96, CALLS_AT_LEAST
};
enum { RESOURCE_EXHAUSTED = 8, UNIMPLEMENTED = 12, INTERNAL = 13, UNAVAILABLE = 14 };
enum { EXTENSION_FFI = 5 };

#define HEAD size_t size; Extension *extensions
typedef struct { HEAD; const Error *error; const char *message; size_t message_size; } MessageArgs;
typedef struct { HEAD; const Error *error; int code; } CodeArgs;
typedef struct { HEAD; Event *event; void (*callback)(Error *, void *); void *user; } OnReadyArgs;
typedef struct {
  HEAD;
  const char *name;
  size_t name_size;
  int type; /* 1: an integer */
  int64_t integer;
  size_t value_size;
} Option;
typedef struct {
  HEAD;
  const Option *options;
  size_t n_options;
  void *get, *get_user, *put, *put_user, *client, *try_get, *try_get_user;
} CreateArgs;
typedef struct { HEAD; void *of; const char *text; size_t text_size; } TextArgs;
typedef struct { HEAD; void *of; int number; } NumberArgs;
typedef struct { HEAD; void *of; size_t number; } SizeArgs;
typedef struct { HEAD; void *of; bool is; } BoolArgs;
typedef struct { HEAD; void *of; void *const *list; size_t count; } ListArgs;
typedef struct { HEAD; void *of; void *result; } PointerArgs;
typedef struct { HEAD; void *of; int number; void *device; } LookupArgs;
typedef struct { HEAD; void *of; } OfArgs;
typedef struct { HEAD; void *of; int64_t code, arguments, results, shared, others[20]; } SizesArgs;
typedef struct { HEAD; char *code; size_t code_size; const char *format; size_t format_size; } Program;
typedef struct {
  HEAD;
  void *client;
  const Program *program;
  const char *options;
  size_t options_size;
  Executable *executable;
} CompileArgs;
typedef struct {
  HEAD;
  Executable *executable;
  const char *bytes;
  size_t n_bytes;
  void *owner, (*destroy)(void *owner);
} SerializeArgs;
typedef struct {
  HEAD;
  void *client;
  const char *bytes;
  size_t n_bytes;
  Executable *executable;
  const char *options;
  size_t n_options;
} DeserializeArgs;
typedef struct {
  HEAD;
  void *client;
  const void *data;
  int type;
  const int64_t *dims;
  size_t n_dims;
  const int64_t *strides;
  size_t n_strides;
  int semantics;
  Device *device;
  void *memory, *layout;
  Event *done;
  Buffer *buffer;
} FromHostArgs;
typedef struct { HEAD; Buffer *buffer; void *to; Buffer *copy; } CopyArgs;
typedef struct {
  HEAD;
  Device *device;
  int64_t in_use, peak;
  bool peak_is_set;
  int64_t allocations;
  bool allocations_is_set;
  int64_t largest;
  bool largest_is_set;
  int64_t limit;
  bool limit_is_set;
} MemoryArgs;
typedef struct {
  HEAD;
  Executable *executable;
  void *options;
  Buffer *const *const *arguments;
  size_t n_devices, n_arguments;
  Buffer **const *results;
  Event **done;
  Device *device;
} ExecuteArgs;

/* The typed FFI */

enum { FFI_METADATA = 1, FFI_STRING = 4 };
typedef struct { const char *at; size_t n; } Span;
typedef struct { HEAD; int type; void *data; int64_t rank; int64_t *dims; } Array;
typedef struct { HEAD; int64_t count; int *types; Array **of; } Arrays;
typedef struct { HEAD; int64_t count; int *types; Span **names; void **of; } Attributes;
typedef struct { HEAD; const char *message; int code; } FfiErrorArgs;
typedef struct { HEAD; int major, minor; } Version;
typedef struct {
  HEAD;
  struct { HEAD; Version version; void *internal; void *(*error)(FfiErrorArgs *); } *api;
  void *context;
  int stage;
  Arrays arguments, results;
  Attributes attributes;
} Frame;
typedef struct { Extension base; struct { size_t size; Version version; } *of; } Metadata;
typedef struct {
  size_t size;
  const char *name;
  size_t name_size;
  void *(*handler)(Frame *);
  const char *platform;
  size_t platform_size;
  int traits;
} RegisterArgs;
typedef struct { Extension base; void *type, *data; Error *(*handler)(RegisterArgs *); } FfiExtension;

/* State of this process */

enum { MOST = 8 };
static const Api *real;
static Api *ours;
static const char *directory;
static int chips = 1, rank = 0;
static bool owns_all; /* one process, all chips */
static Device *own[MOST];   /* the plugin's devices */
static Device *named[MOST]; /* the same by the number of the chip */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

static double number_of(const char *variable, double otherwise) {
  const char *text = getenv(variable);
  return text && *text ? atof(text) : otherwise;
}

/* Errors: our own begin with a mark */

static const char mark;
typedef struct { const void *mark; int code; char text[1000]; } OwnError;

static bool is_own(const Error *error) { return error && ((const OwnError *)error)->mark == &mark; }

static Error *own_error(int code, const char *format, ...) {
  OwnError *error = calloc(1, sizeof *error);
  va_list values;
  va_start(values, format);
  vsnprintf(error->text, sizeof error->text, format, values);
  va_end(values);
  error->mark = &mark;
  error->code = code;
  return error;
}

static Error *error_destroy(void *args) {
  void *error = ((OfArgs *)args)->of;
  if (!is_own(error)) return real->call[ERROR_DESTROY](args);
  free(error);
  return NULL;
}

static Error *error_message(void *args) {
  MessageArgs *a = args;
  if (!is_own(a->error)) return real->call[ERROR_MESSAGE](a);
  a->message = ((const OwnError *)a->error)->text;
  a->message_size = strlen(a->message);
  return NULL;
}

static Error *error_code(void *args) {
  CodeArgs *a = args;
  if (!is_own(a->error)) return real->call[ERROR_GET_CODE](a);
  a->code = ((const OwnError *)a->error)->code;
  return NULL;
}

static void drop(Error *error) {
  if (error) error_destroy(&(OfArgs){.size = sizeof(OfArgs), .of = error});
}

static void must(Error *error) {
  if (!error) return;
  MessageArgs m = {.size = sizeof m, .error = error};
  error_message(&m);
  fprintf(stderr, "emulated TPU: %.*s\n", (int)m.message_size, m.message);
  abort();
}

/* Chips: whose they are, and their names */

static int file_in(const char *name, int number, int flags) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s%d", directory, name, number);
  return open(path, flags | O_RDWR | O_CLOEXEC, 0600);
}

/* A record lock ends with its process, and names it. No second descriptor of an own file is ever closed. */
static bool hold_chip(int chip) {
  int file = file_in("chip", chip, O_CREAT);
  return file >= 0 && !fcntl(file, F_SETLK, &(struct flock){.l_type = F_WRLCK});
}

static pid_t holder_of(int chip) {
  struct flock held = {.l_type = F_WRLCK};
  int file = file_in("chip", chip, 0);
  if (file < 0) return 0;
  if (fcntl(file, F_GETLK, &held)) held.l_type = F_UNLCK;
  close(file);
  return held.l_type == F_UNLCK ? 0 : held.l_pid;
}

/* Messages of an earlier process of this chip */
static void forget(void) {
  char pattern[4096];
  glob_t found = {0};
  snprintf(pattern, sizeof pattern, "%s/[0-9]*.%d", directory, rank);
  if (!glob(pattern, 0, NULL, &found))
    for (size_t i = 0; i < found.gl_pathc; i++) unlink(found.gl_pathv[i]);
  globfree(&found);
}

/* Wait until the other chips are open, too, as libtpu does. Then no message of an earlier launch is left. */
static Error *wait_for_others(double timeout_s) {
  pid_t me = getpid();
  int file = file_in("open", rank, O_CREAT | O_TRUNC);
  if (file < 0 || write(file, &me, sizeof me) != sizeof me)
    return own_error(INTERNAL, "cannot write %s", directory);
  close(file);
  for (double waited = 0; waited < timeout_s; waited += 0.005, usleep(5000)) {
    int open_chips = 1;
    for (int r = 0; r < chips; r++) {
      pid_t other = 0;
      if (r == rank || (file = file_in("open", r, 0)) < 0) continue;
      if (read(file, &other, sizeof other) != sizeof other) other = 0;
      close(file);
      open_chips += other && other == holder_of(r);
    }
    if (open_chips == chips) return NULL;
  }
  return own_error(UNAVAILABLE, "TPU initialization failed: not all of %d chips were opened within %.0f s",
                   chips, timeout_s);
}

static double wait_s(void) { return number_of("TPUKIT_EMULATE_WAIT_S", 600); }

static Error *client_create(void *args) {
  CreateArgs *a = args, b = *a;
  const char *bounds = getenv("TPU_PROCESS_BOUNDS"), *visible = getenv("TPU_VISIBLE_CHIPS");
  int x = 1, y = 1, z = 1, present = number_of("TPUKIT_EMULATE_CHIPS", 1);
  owns_all = !bounds || sscanf(bounds, "%d,%d,%d", &x, &y, &z) != 3;
  chips = owns_all ? present : x * y * z;
  if (chips > MOST) return own_error(INTERNAL, "TPU initialization failed: %d of %d chips", chips, MOST);
  rank = owns_all || chips == 1 ? 0 : number_of("CLOUD_TPU_TASK_ID", 0);
  int first = owns_all ? 0 : number_of("TPU_VISIBLE_CHIPS", rank), last = owns_all ? chips - 1 : first;
  if (visible && strchr(visible, ',') && !owns_all)
    return own_error(UNIMPLEMENTED, "a process has one emulated chip or all, not these: %s", visible);
  for (int chip = first; chip <= last; chip++) {
    if (chip < present && hold_chip(chip)) continue;
    const char *why = chip < present ? "Device or resource busy" : "No such file or directory";
    return own_error(UNAVAILABLE, "TPU initialization failed: open(/dev/vfio/%d): %s: %s; Couldn't open "
                     "iommu group /dev/vfio/%d", chip, why, why, chip);
  }
  if (!owns_all && chips > 1) {
    forget();
    Error *error = wait_for_others(wait_s());
    if (error) return error;
  }
  Option count = {.size = sizeof count, .name = "cpu_device_count", .name_size = 16, .type = 1};
  count.integer = MOST;
  count.value_size = 1;
  b.options = &count;
  b.n_options = 1;
  Error *error = real->call[CLIENT_CREATE](&b);
  a->client = b.client;
  if (error) return error;
  ListArgs list = {.size = sizeof list, .of = a->client};
  must(real->call[CLIENT_DEVICES](&list));
  if (list.count < MOST) return own_error(INTERNAL, "the plugin has %zu devices, not %d", list.count, MOST);
  memcpy(own, list.list, sizeof own);
  memcpy(named, own, sizeof own);
  named[rank] = own[0];
  named[0] = own[rank];
  return NULL;
}

static int chip_of(const Device *device) {
  for (int chip = 0; chip < MOST; chip++)
    if (named[chip] == device) return chip;
  return 0;
}

static Error *text(void *args, const char *said) {
  TextArgs *a = args;
  a->text = said;
  a->text_size = strlen(said);
  return NULL;
}

static Error *list(void *args, void *const *of, size_t count) {
  ListArgs *a = args;
  a->list = of;
  a->count = count;
  return NULL;
}

static Error *number(void *args, int it) {
  ((NumberArgs *)args)->number = it;
  return NULL;
}

/* Attributes and their number, of which torch_xla 2.8 says a size without the number */
static Error *plugin_attributes(void *args) {
  PointerArgs *a = args;
  a->size = sizeof *a;
  return real->call[PLUGIN_ATTRIBUTES](a);
}

static size_t n_own(void) { return owns_all ? chips : 1; }
static Error *platform_name(void *args) { return text(args, "tpu"); }
static Error *kind(void *args) { return text(args, "TPU v5 lite"); }
static Error *process_index(void *args) { return number(args, rank); }
static Error *devices(void *args) { return list(args, named, chips); }
static Error *addressable_devices(void *args) { return list(args, own, n_own()); }

static Error *description_id(void *args) {
  NumberArgs *a = args;
  Error *error = real->call[DESCRIPTION_ID](a);
  if (!error) a->number = a->number == 0 ? rank : a->number == rank ? 0 : a->number;
  return error;
}

static Error *description_process(void *args) {
  NumberArgs a = {.size = sizeof a, .of = ((NumberArgs *)args)->of};
  must(description_id(&a));
  return number(args, owns_all ? 0 : a.number);
}

static Error *lookup(void *args) {
  LookupArgs *a = args;
  if (a->number < 0 || a->number >= chips) return own_error(INTERNAL, "no chip %d of %d", a->number, chips);
  a->device = named[a->number];
  return NULL;
}

static Error *is_addressable(void *args) {
  BoolArgs *a = args;
  a->is = owns_all ? chip_of(a->of) < chips : a->of == own[0];
  return NULL;
}

static Error *addressable_memories(void *args) {
  static void *memories[MOST * 8];
  size_t count = 0;
  for (size_t d = 0; d < n_own(); d++) {
    ListArgs of_device = {.size = sizeof of_device, .of = own[d]};
    must(real->call[DEVICE_ADDRESSABLE_MEMORIES](&of_device));
    for (size_t i = 0; i < of_device.count && i < 8; i++) memories[count++] = of_device.list[i];
  }
  return list(args, memories, count);
}

/* HBM: the bytes of all buffers. Temporary memory of a program is not counted: the CPU's is not a TPU's. */

enum { BUCKETS = 1 << 14 };
typedef struct Held { const Buffer *buffer; size_t bytes; int chip; struct Held *next; } Held;
static Held *held[BUCKETS];
static int64_t in_use[MOST], peak[MOST], limit;

static Held **place_of(const Buffer *buffer) { return &held[((uintptr_t)buffer >> 4) % BUCKETS]; }

static void release(const Buffer *buffer) {
  pthread_mutex_lock(&lock);
  for (Held **at = place_of(buffer); *at; at = &(*at)->next) {
    if ((*at)->buffer != buffer) continue;
    Held *gone = *at;
    in_use[gone->chip] -= gone->bytes;
    *at = gone->next;
    free(gone);
    break;
  }
  pthread_mutex_unlock(&lock);
}

static void amount(char said[16], double bytes) {
  int unit = 0;
  for (; bytes >= 1024 && unit < 3; unit++) bytes /= 1024;
  snprintf(said, 16, unit ? "%.2f%c" : "%.0f%c", bytes, "BKMG"[unit]);
}

static Error *check_room(int chip, int64_t bytes) {
  pthread_mutex_lock(&lock);
  int64_t free_bytes = limit - in_use[chip];
  pthread_mutex_unlock(&lock);
  if (bytes <= free_bytes) return NULL;
  char needed[16], left[16];
  amount(needed, bytes);
  amount(left, free_bytes);
  return own_error(RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED: Attempting to reserve %s at the bottom of "
                   "memory. That was not possible. There are %s free, 0B reserved, and %s reservable.",
                   needed, left, left);
}

static void count(Buffer *buffer) {
  SizeArgs size = {.size = sizeof size, .of = buffer};
  PointerArgs on = {.size = sizeof on, .of = buffer};
  must(real->call[BUFFER_SIZE](&size));
  must(real->call[BUFFER_DEVICE](&on));
  int chip = chip_of(on.result);
  Held *one = malloc(sizeof *one), **at = place_of(buffer);
  pthread_mutex_lock(&lock);
  *one = (Held){buffer, size.number, chip, *at};
  *at = one;
  in_use[chip] += size.number;
  if (in_use[chip] > peak[chip]) peak[chip] = in_use[chip];
  pthread_mutex_unlock(&lock);
}

/* Count a buffer that came from outside a program, or destroy it if it does not fit. */
static Error *admit(Buffer **buffer) {
  SizeArgs size = {.size = sizeof size, .of = *buffer};
  PointerArgs on = {.size = sizeof on, .of = *buffer};
  must(real->call[BUFFER_SIZE](&size));
  must(real->call[BUFFER_DEVICE](&on));
  Error *error = check_room(chip_of(on.result), size.number);
  if (!error) count(*buffer);
  else drop(real->call[BUFFER_DESTROY](&(OfArgs){.size = sizeof(OfArgs), .of = *buffer}));
  return error;
}

static Error *buffer_from_host(void *args) {
  FromHostArgs *a = args;
  Error *error = real->call[CLIENT_BUFFER_FROM_HOST](a);
  if (error || !(error = admit(&a->buffer))) return error;
  if (a->done) drop(real->call[EVENT_DESTROY](&(OfArgs){.size = sizeof(OfArgs), .of = a->done}));
  return error;
}

static Error *copy_to_device(void *args) {
  Error *error = real->call[BUFFER_COPY_TO_DEVICE](args);
  return error ? error : admit(&((CopyArgs *)args)->copy);
}

static Error *copy_to_memory(void *args) {
  Error *error = real->call[BUFFER_COPY_TO_MEMORY](args);
  return error ? error : admit(&((CopyArgs *)args)->copy);
}

static Error *buffer_destroy(void *args) {
  release(((OfArgs *)args)->of);
  return real->call[BUFFER_DESTROY](args);
}

static Error *buffer_delete(void *args) {
  release(((OfArgs *)args)->of);
  return real->call[BUFFER_DELETE](args);
}

static Error *memory_stats(void *args) {
  MemoryArgs *a = args;
  int chip = chip_of(a->device);
  pthread_mutex_lock(&lock);
  a->in_use = in_use[chip];
  a->peak = peak[chip];
  pthread_mutex_unlock(&lock);
  a->limit = limit;
  a->peak_is_set = a->limit_is_set = true;
  a->allocations_is_set = a->largest_is_set = false;
  return NULL;
}

/* Programs: protobuf, as much as is needed to rewrite HLO */

typedef struct { unsigned char *at; size_t n, room; } Bytes;

static void put(Bytes *to, const void *data, size_t n) {
  if (to->n + n > to->room) to->at = realloc(to->at, to->room = (to->n + n) * 2 + 64);
  memcpy(to->at + to->n, data, n);
  to->n += n;
}

static void put_varint(Bytes *to, uint64_t value) {
  do {
    unsigned char low = (value & 127) | (value > 127 ? 128 : 0);
    put(to, &low, 1);
  } while (value >>= 7);
}

static void put_number(Bytes *to, int field, uint64_t value) {
  put_varint(to, field << 3);
  put_varint(to, value);
}

static void put_bytes(Bytes *to, int field, const void *data, size_t n) {
  put_varint(to, field << 3 | 2);
  put_varint(to, n);
  put(to, data, n);
}

static void put_text(Bytes *to, int field, const char *said) { put_bytes(to, field, said, strlen(said)); }

typedef struct { const unsigned char *at, *end; } Reader;
typedef struct { int id; bool is_bytes; uint64_t number; Reader of; const unsigned char *start; } Field;

static Reader over(const void *data, size_t n) { return (Reader){data, (const unsigned char *)data + n}; }

static uint64_t varint(Reader *from) {
  uint64_t value = 0;
  for (int shift = 0; from->at < from->end && shift < 64; shift += 7) {
    unsigned char low = *from->at++;
    value |= (uint64_t)(low & 127) << shift;
    if (low < 128) break;
  }
  return value;
}

static bool next(Reader *from, Field *field) {
  if (from->at >= from->end) return false;
  *field = (Field){.start = from->at};
  uint64_t tag = varint(from), wire = tag & 7, n = wire == 1 ? 8 : wire == 5 ? 4 : 0;
  field->id = tag >> 3;
  if (wire == 0) field->number = varint(from);
  if (wire == 2) n = varint(from);
  if (n > (uint64_t)(from->end - from->at)) n = from->end - from->at;
  field->is_bytes = wire == 2;
  field->of = over(from->at, n);
  from->at += n;
  return true;
}

static void keep(Bytes *to, const Reader *after, const Field *field) {
  put(to, field->start, after->at - field->start);
}

/* The numbers of a repeated field, packed or not */
static int numbers(const Field *field, int64_t *to, int room) {
  if (!field->is_bytes) {
    if (room > 0) to[0] = field->number;
    return room > 0;
  }
  Reader from = field->of;
  int count = 0;
  while (from.at < from.end && count < room) to[count++] = varint(&from);
  return count;
}

static bool says(const Field *field, const char *word) {
  size_t n = field->of.end - field->of.at;
  return field->is_bytes && n == strlen(word) && !memcmp(field->of.at, word, n);
}

/* Fields of HloModuleProto, HloComputationProto, HloInstructionProto */
enum { COMPUTATIONS = 3, DEVICE_ASSIGNMENT = 15, INSTRUCTIONS = 2, COMPUTATION_ID = 5 };
enum {
  OPCODE = 2, DIMENSIONS = 14, CHANNEL = 26, TARGET = 28, ID = 35, AFTER = 37, CALLED = 38, CONFIG = 43,
  OLD_ID = 45, GROUPS = 49, PAIRS = 52, LAYOUT_IS_FIXED = 56, HAS_EFFECT = 65, GLOBAL_IDS = 71,
  CALL_VERSION = 77, DEVICE_LIST = 87
};
static const char COLLECTIVE[] = "tpukit_emulated_collective";
static const char *const KINDS[] = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all",
                                    "collective-permute"};
static const char *const REDUCTIONS[] = {"add", "multiply", "maximum", "minimum", "and", "or"};
#define COUNT(array) (int)(sizeof(array) / sizeof *(array))

static const char *one_of(const Field *field, const char *const *words, int count) {
  for (int i = 0; i < count; i++)
    if (says(field, words[i])) return words[i];
  return NULL;
}

static const char *reduction_of(Reader module, int64_t id) {
  Field computation, part, detail;
  while (next(&module, &computation)) {
    if (computation.id != COMPUTATIONS) continue;
    const char *found = NULL, *word;
    int64_t its_id = -1;
    while (next(&computation.of, &part)) {
      if (part.id == COMPUTATION_ID) its_id = part.number;
      if (part.id != INSTRUCTIONS) continue;
      while (next(&part.of, &detail))
        if (detail.id == OPCODE && (word = one_of(&detail, REDUCTIONS, COUNT(REDUCTIONS)))) found = word;
    }
    if (its_id == id) return found;
  }
  return NULL;
}

static void put_groups(Bytes *to, Reader from, int id) {
  Field group, ids;
  while (next(&from, &group)) {
    if (group.id != id) continue;
    while (next(&group.of, &ids)) {
      int64_t members[MOST];
      int count = numbers(&ids, members, MOST);
      for (int i = 0; i < count; i++) {
        char digit = '0' + members[i];
        put(to, &digit, 1);
      }
    }
    put(to, ";", 1);
  }
}

/* A collective as a custom call: its attribute `how` is "KIND REDUCTION DIMENSION NUMBER GROUPS", the groups
 * as "01;23;", the pairs of a permutation alike. It comes after the collective before it, of the id `after`.
 * Returns its own id. */
static int64_t put_call(Bytes *to, Reader instruction, const char *kind, Reader module, int count,
                        int64_t after, Error **error) {
  const char *reduction = "-";
  int64_t dimension = 0, called = -1, id = 0;
  Bytes call = {0}, groups = {0}, attributes = {0};
  Reader from = instruction;
  for (Field f; next(&from, &f);) {
    if (f.id == DIMENSIONS) numbers(&f, &dimension, 1);
    if (f.id == CALLED) numbers(&f, &called, 1);
    if (f.id == ID) id = f.number;
    if (f.id == DEVICE_LIST) {
      Reader device_list = f.of;
      for (Field g; next(&device_list, &g);)
        if (g.id == 2) *error = own_error(UNIMPLEMENTED, "the emulated TPU has no iota replica groups");
      put_groups(&groups, f.of, 1);
    }
    switch (f.id) {
      case OPCODE: case DIMENSIONS: case CHANNEL: case CALLED: case CONFIG: case OLD_ID: case GROUPS:
      case PAIRS: case LAYOUT_IS_FIXED: case GLOBAL_IDS: case DEVICE_LIST: break;
      default: keep(&call, &from, &f);
    }
  }
  if (!groups.n) put_groups(&groups, instruction, GROUPS);
  from = instruction;
  for (Field f; next(&from, &f);) { /* source and target, each 0 where it is not written */
    if (f.id != PAIRS) continue;
    int64_t pair[3] = {0};
    for (Field end; next(&f.of, &end);) if (end.id <= 2) pair[end.id] = end.number;
    char digits[3] = {'0' + pair[1], '0' + pair[2], ';'};
    put(&groups, digits, 3);
  }
  if (called >= 0 && !(reduction = reduction_of(module, called)))
    *error = own_error(UNIMPLEMENTED, "the emulated TPU cannot %s by this computation", kind);
  char how[200];
  if (!reduction) reduction = "-";
  snprintf(how, sizeof how, "{how = \"%s %s %ld %d ", kind, reduction, (long)dimension, count);
  put(&attributes, how, strlen(how));
  put(&attributes, groups.at ? groups.at : (void *)"", groups.n);
  put(&attributes, "\"}", 2);
  put_text(&call, OPCODE, "custom-call");
  put_text(&call, TARGET, COLLECTIVE);
  put_bytes(&call, CONFIG, attributes.at, attributes.n);
  put_number(&call, HAS_EFFECT, 1);
  put_number(&call, CALL_VERSION, 4); /* the typed FFI */
  if (after >= 0) put_number(&call, AFTER, after);
  put_bytes(to, INSTRUCTIONS, call.at, call.n);
  free(call.at), free(groups.at), free(attributes.at);
  return id;
}

/* Rewrite a module; return its number of collectives. */
static int rewrite(Reader module, Bytes *to, Error **error) {
  int count = 0;
  Reader all = module, inside, from;
  for (Field c, i, f; next(&all, &c);) {
    if (c.id == DEVICE_ASSIGNMENT) continue;
    if (c.id != COMPUTATIONS) { keep(to, &all, &c); continue; }
    Bytes computation = {0};
    int64_t after = -1;
    for (inside = c.of; next(&inside, &i);) {
      const char *kind = NULL;
      if (i.id == INSTRUCTIONS)
        for (from = i.of; next(&from, &f);)
          if (f.id == OPCODE) kind = one_of(&f, KINDS, COUNT(KINDS));
      if (kind) after = put_call(&computation, i.of, kind, module, count++, after, error);
      else keep(&computation, &inside, &i);
    }
    put_bytes(to, COMPUTATIONS, computation.at, computation.n);
    free(computation.at);
  }
  return count;
}

/* Fields of CompileOptionsProto and ExecutableBuildOptionsProto */
enum { BUILD = 3, PORTABLE = 4, DEVICE_ORDINAL = 1, REPLICAS = 4, PARTITIONS = 5, ASSIGNMENT = 9 };

static uint64_t partitions_of(Reader options) {
  uint64_t count = 1;
  for (Field f, o; next(&options, &f);)
    if (f.id == BUILD)
      while (next(&f.of, &o)) if (o.id == PARTITIONS) count = o.number;
  return count;
}

/* A program of one replica is for the plugin's device 0, or, in a process with several, for any. */
static bool is_portable(void) { return owns_all && chips > 1; }

/* A DeviceAssignmentProto: one replica, one computation, whose devices are {0} */
static const char ON_DEVICE_0[] = "\x08\x01\x10\x01\x1a\x02\x08\x00";

static void one_replica(Reader options, Bytes *to) {
  for (Field f, o; next(&options, &f);) {
    if (f.id == PORTABLE) continue;
    if (f.id != BUILD) { keep(to, &options, &f); continue; }
    Bytes build = {0};
    for (Reader from = f.of; next(&from, &o);)
      if (o.id != DEVICE_ORDINAL && o.id != REPLICAS && o.id != PARTITIONS && o.id != ASSIGNMENT)
        keep(&build, &from, &o);
    put_number(&build, REPLICAS, 1);
    put_number(&build, PARTITIONS, 1);
    if (!is_portable()) put_bytes(&build, ASSIGNMENT, ON_DEVICE_0, sizeof ON_DEVICE_0 - 1);
    put_bytes(to, BUILD, build.at, build.n);
    free(build.at);
  }
  if (is_portable()) put_number(to, PORTABLE, 1);
}

typedef struct Loaded {
  const Executable *executable;
  size_t n_results;
  int64_t needs; /* bytes of results that take no argument's memory */
  bool talks;
  struct Loaded *next;
} Loaded;
static Loaded *loaded;

static Error *remember(Executable *executable, bool talks) {
  PointerArgs inner = {.size = sizeof inner, .of = executable};
  must(real->call[LOADED_GET_EXECUTABLE](&inner));
  SizeArgs results = {.size = sizeof results, .of = inner.result};
  must(real->call[EXECUTABLE_NUM_OUTPUTS](&results));
  SizesArgs sizes = {.size = sizeof sizes, .of = inner.result};
  must(real->call[EXECUTABLE_MEMORY](&sizes));
  drop(real->call[EXECUTABLE_DESTROY](&(OfArgs){.size = sizeof(OfArgs), .of = inner.result}));
  int64_t needs = sizes.results - sizes.shared;
  if (sizes.arguments + needs > limit) {
    char all[16], of[16];
    amount(all, sizes.arguments + needs);
    amount(of, limit);
    drop(real->call[LOADED_DESTROY](&(OfArgs){.size = sizeof(OfArgs), .of = executable}));
    return own_error(RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of "
                     "memory in memory space hbm. Used %s of %s hbm.", all, of);
  }
  Loaded *one = malloc(sizeof *one);
  pthread_mutex_lock(&lock);
  *one = (Loaded){executable, results.number, needs, talks, loaded};
  loaded = one;
  pthread_mutex_unlock(&lock);
  return NULL;
}

static const Loaded *find_loaded(const Executable *executable) {
  pthread_mutex_lock(&lock);
  const Loaded *one = loaded;
  while (one && one->executable != executable) one = one->next;
  pthread_mutex_unlock(&lock);
  return one;
}

static Error *loaded_destroy(void *args) {
  pthread_mutex_lock(&lock);
  for (Loaded **at = &loaded; *at; at = &(*at)->next) {
    if ((*at)->executable != ((OfArgs *)args)->of) continue;
    Loaded *gone = *at;
    *at = gone->next;
    free(gone);
    break;
  }
  pthread_mutex_unlock(&lock);
  return real->call[LOADED_DESTROY](args);
}

static bool write_all(int file, const void *data, size_t n) {
  for (ssize_t wrote; n; data = (const char *)data + wrote, n -= wrote)
    if ((wrote = write(file, data, n)) <= 0) return false;
  return true;
}

/* Chips mostly compile the same programs: the first one does, and the others load its result, a file */

static uint64_t hash(uint64_t from, const char *data, size_t n) { /* FNV-1a */
  for (size_t i = 0; i < n; i++) from = (from ^ (unsigned char)data[i]) * 0x100000001b3;
  return from;
}

static bool load(CompileArgs *a, int file, size_t n) {
  char *bytes = mmap(NULL, n, PROT_READ, MAP_SHARED, file, 0);
  if (bytes == MAP_FAILED) return false;
  DeserializeArgs it = {.size = sizeof it, .client = a->client, .bytes = bytes, .n_bytes = n};
  Error *error = real->call[EXECUTABLE_DESERIALIZE](&it);
  munmap(bytes, n);
  a->executable = it.executable;
  drop(error);
  return !error;
}

static void save(Executable *executable, int file) {
  PointerArgs inner = {.size = sizeof inner, .of = executable};
  must(real->call[LOADED_GET_EXECUTABLE](&inner));
  SerializeArgs it = {.size = sizeof it, .executable = inner.result};
  Error *error = real->call[EXECUTABLE_SERIALIZE](&it);
  if (!error) {
    if (ftruncate(file, 0) || !write_all(file, it.bytes, it.n_bytes)) perror("emulated TPU");
    it.destroy(it.owner);
  }
  drop(error);
  drop(real->call[EXECUTABLE_DESTROY](&(OfArgs){.size = sizeof(OfArgs), .of = inner.result}));
}

static Error *compile_or_load(CompileArgs *a) {
  if (chips == 1 || owns_all) return real->call[CLIENT_COMPILE](a);
  uint64_t name = hash(hash(0xcbf29ce484222325, a->program->code, a->program->code_size), a->options,
                       a->options_size);
  char path[4096];
  snprintf(path, sizeof path, "%s/program-%016llx", directory, (unsigned long long)name);
  int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  struct stat of = {0};
  bool is_mine = file >= 0 && !flock(file, LOCK_EX) && !fstat(file, &of) && !of.st_size;
  if (file >= 0 && !is_mine) flock(file, LOCK_UN); /* so that all others can load */
  Error *error = NULL;
  if (!of.st_size || !load(a, file, of.st_size)) error = real->call[CLIENT_COMPILE](a);
  if (is_mine && !error) save(a->executable, file);
  if (file >= 0) close(file);
  return error;
}

static Error *compile(void *args) {
  CompileArgs *a = args, b = *a;
  Program program = *a->program;
  Reader module = over(program.code, program.code_size), options = over(a->options, a->options_size);
  Bytes code = {0}, one = {0};
  int talks = 0;
  Error *error = NULL;
  if (memmem(program.code, program.code_size, "tpu_custom_call", 15))
    return own_error(UNIMPLEMENTED, "the emulated TPU has no Mosaic (Pallas) kernels; a TPU has");
  if (partitions_of(options) == 1) {
    if (program.format_size != 3 || memcmp(program.format, "hlo", 3))
      return own_error(UNIMPLEMENTED, "the emulated TPU takes HLO, not %.*s (unset XLA_STABLEHLO_COMPILE)",
                       (int)program.format_size, program.format);
    talks = rewrite(module, &code, &error);
    one_replica(options, &one);
    program.code = (char *)code.at;
    program.code_size = code.n;
    b.program = &program;
    b.options = (char *)one.at;
    b.options_size = one.n;
    if (!error && talks && owns_all && chips > 1)
      error = own_error(UNIMPLEMENTED, "a program with collectives, in one process that opened all %d chips: "
                        "start a process for each chip (torch_xla.launch), or use SPMD", chips);
  }
  if (!error && !(error = compile_or_load(&b))) {
    a->executable = b.executable;
    error = remember(a->executable, talks && chips > 1);
  }
  free(code.at), free(one.at);
  return error;
}

/* Launches. Programs that talk run one after the other, so that the n-th of each chip meet */

enum { COLLECTIVES = 1 << 14 };
static long launch, turns[COLLECTIVES];
static bool is_running;

static void begin(void) {
  pthread_mutex_lock(&lock);
  while (is_running) pthread_cond_wait(&changed, &lock);
  is_running = true;
  launch++;
  memset(turns, 0, sizeof turns);
  pthread_mutex_unlock(&lock);
}

static void end(Error *error, void *event) {
  drop(error);
  pthread_mutex_lock(&lock);
  is_running = false;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
  if (event) drop(real->call[EVENT_DESTROY](&(OfArgs){.size = sizeof(OfArgs), .of = event}));
}

static void count_results(const ExecuteArgs *a, size_t n_results) {
  for (size_t d = 0; d < a->n_devices; d++) {
    for (size_t i = 0; i < a->n_arguments; i++) { /* the donated ones are gone */
      BoolArgs gone = {.size = sizeof gone, .of = a->arguments[d][i]};
      must(real->call[BUFFER_IS_DELETED](&gone));
      if (gone.is) release(gone.of);
    }
    for (size_t i = 0; i < n_results; i++) count(a->results[d][i]);
  }
}

static Error *execute(void *args) {
  ExecuteArgs *a = args, b = *a;
  Event *events[MOST];
  _Alignas(16) char options[512] = {0}; /* torch_xla's are older, and shorter than the plugin wants */
  size_t size = *(size_t *)a->options, wanted = 112;
  memcpy(options, a->options, size < wanted ? size : wanted);
  *(size_t *)options = wanted;
  b.options = options;
  if (!is_portable()) b.device = NULL;
  const Loaded *one = find_loaded(a->executable);
  size_t n_results = one ? one->n_results : 0;
  bool talks = one && one->talks;
  for (size_t d = 0; d < a->n_devices && one; d++) {
    Error *error = check_room(a->n_devices > 1 ? (int)d : a->device ? chip_of(a->device) : rank, one->needs);
    if (error) return error;
  }
  if (talks) begin();
  if (talks && !a->done) b.done = events;
  Error *error = real->call[LOADED_EXECUTE](&b);
  if (talks && error) end(NULL, NULL);
  else if (talks) {
    OnReadyArgs ended = {.size = sizeof ended, .event = b.done[0], .callback = end};
    ended.user = a->done ? NULL : b.done[0]; /* to be destroyed, if nobody else does */
    must(real->call[EVENT_ON_READY](&ended));
  }
  if (!error) count_results(a, n_results);
  return error;
}

/* Collectives */

static const struct { const char *name; int bytes; } TYPES[] = {
    [1] = {"pred", 1}, {"s8", 1}, {"s16", 2}, {"s32", 4}, {"s64", 8}, {"u8", 1}, {"u16", 2}, {"u32", 4},
    {"u64", 8}, {"f16", 2}, {"f32", 4}, {"f64", 8}, [15] = {"c64", 8}, {"bf16", 2}, [18] = {"c128", 16},
    {"f8e5m2", 1}, {"f8e4m3fn", 1}};

static size_t bytes_of(const Array *array) {
  size_t n = TYPES[array->type].bytes;
  for (int i = 0; i < array->rank; i++) n *= array->dims[i];
  return n;
}

static float of_bf16(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float it;
  memcpy(&it, &bits, 4);
  return it;
}

static uint16_t to_bf16(float it) {
  uint32_t bits;
  memcpy(&bits, &it, 4);
  return it != it ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

#define AS_IT_IS(x) (x)
#define EACH(T, FROM, TO, RESULT)                                            \
  for (size_t i = 0; i < n / sizeof(T); i++) {                               \
    __typeof__(FROM((T)0)) x = FROM(((T *)to)[i]), y = FROM(((T *)from)[i]); \
    ((T *)to)[i] = TO(RESULT);                                               \
  }                                                                          \
  return true;
#define NUMBERS(T, FROM, TO)                                                          \
  if (!strcmp(reduction, "add")) { EACH(T, FROM, TO, x + y) }                         \
  if (!strcmp(reduction, "multiply")) { EACH(T, FROM, TO, x * y) }                    \
  if (!strcmp(reduction, "maximum")) { EACH(T, FROM, TO, y > x || y != y ? y : x) }   \
  if (!strcmp(reduction, "minimum")) { EACH(T, FROM, TO, y < x || y != y ? y : x) }   \
  return false;
#define WHOLE_NUMBERS(T)                                                \
  if (!strcmp(reduction, "and")) { EACH(T, AS_IT_IS, AS_IT_IS, x & y) } \
  if (!strcmp(reduction, "or")) { EACH(T, AS_IT_IS, AS_IT_IS, x | y) }  \
  NUMBERS(T, AS_IT_IS, AS_IT_IS)

/* to = to (reduction) from, for n bytes; false if there is no such reduction of the type */
static bool fold(const char *reduction, int type, void *to, const void *from, size_t n) {
  switch (type) {
    case 1: WHOLE_NUMBERS(uint8_t)
    case 2: WHOLE_NUMBERS(int8_t)
    case 3: WHOLE_NUMBERS(int16_t)
    case 4: WHOLE_NUMBERS(int32_t)
    case 5: WHOLE_NUMBERS(int64_t)
    case 6: WHOLE_NUMBERS(uint8_t)
    case 7: WHOLE_NUMBERS(uint16_t)
    case 8: WHOLE_NUMBERS(uint32_t)
    case 9: WHOLE_NUMBERS(uint64_t)
#ifdef __FLT16_MAX__
    case 10: NUMBERS(_Float16, AS_IT_IS, AS_IT_IS)
#endif
    case 11: NUMBERS(float, AS_IT_IS, AS_IT_IS)
    case 12: NUMBERS(double, AS_IT_IS, AS_IT_IS)
    case 16: NUMBERS(uint16_t, of_bf16, to_bf16)
    default: return false;
  }
}

/* A message: what the chip gives to a collective. The last reader deletes it. */
typedef struct { int unread; char what[252]; char data[]; } Message;
typedef struct { char kind[24], reduction[12], groups[160]; int dimension, number; } How;

static void *ffi_error(Frame *frame, const char *format, ...) {
  char said[1000];
  va_list values;
  va_start(values, format);
  vsnprintf(said, sizeof said, format, values);
  va_end(values);
  return frame->api->error(&(FfiErrorArgs){.size = sizeof(FfiErrorArgs), .message = said, .code = INTERNAL});
}

static bool read_how(const Frame *frame, How *how) {
  for (int i = 0; i < frame->attributes.count; i++) {
    const Span *name = frame->attributes.names[i], *value = frame->attributes.of[i];
    char said[256];
    if (frame->attributes.types[i] != FFI_STRING || name->n != 3 || memcmp(name->at, "how", 3)) continue;
    snprintf(said, sizeof said, "%.*s", (int)value->n, value->at);
    return sscanf(said, "%23s %11s %d %d %159s", how->kind, how->reduction, &how->dimension, &how->number,
                  how->groups) >= 4;
  }
  return false;
}

/* The chips of this chip's group, in the group's order; all if there are no groups */
static int members_of(const How *how, int members[MOST]) {
  bool is_permutation = !strcmp(how->kind, "collective-permute");
  for (const char *group = how->groups; !is_permutation && *group; group = strchr(group, ';') + 1) {
    int n = strchr(group, ';') - group;
    bool is_mine = false;
    for (int i = 0; i < n && n <= MOST; i++) is_mine |= (members[i] = group[i] - '0') == rank;
    if (is_mine) return n;
  }
  for (int r = 0; r < chips; r++) members[r] = r;
  return chips;
}

static void path_of(char path[4096], long turn, int number, int chip) {
  snprintf(path, 4096, "%s/%ld-%d-%ld.%d", directory, launch, number, turn, chip);
}

static void describe(const Frame *frame, const How *how, char *what, size_t room) {
  size_t n = snprintf(what, room, "%s of", how->kind);
  for (int i = 0; i < frame->arguments.count && n < room; i++) {
    const Array *array = frame->arguments.of[i];
    n += snprintf(what + n, room - n, " %s[", TYPES[array->type].name);
    for (int d = 0; d < array->rank && n < room; d++)
      n += snprintf(what + n, room - n, d ? ",%ld" : "%ld", (long)array->dims[d]);
    if (n < room) n += snprintf(what + n, room - n, "]");
  }
}

static bool give(const Frame *frame, const Message *head, const char *path) {
  char unfinished[4100];
  snprintf(unfinished, sizeof unfinished, "%s~", path);
  int file = open(unfinished, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0600);
  bool is_whole = file >= 0 && write_all(file, head, sizeof *head);
  for (int i = 0; i < frame->arguments.count && is_whole; i++)
    is_whole = write_all(file, frame->arguments.of[i]->data, bytes_of(frame->arguments.of[i]));
  if (file >= 0) close(file);
  return is_whole && !rename(unfinished, path);
}

static Message *take(const char *path, size_t *size) {
  struct stat about;
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return NULL;
  void *at = MAP_FAILED;
  if (!fstat(file, &about)) at = mmap(NULL, about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  *size = about.st_size;
  return at == MAP_FAILED ? NULL : at;
}

static double now(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec + at.tv_nsec * 1e-9;
}

static void *missed(Frame *frame, const How *how, const char *what, const int *members, int n, long turn) {
  char path[4096], waiting[64] = "", missing[64] = "", number[8];
  for (int i = 0; i < n; i++) {
    path_of(path, turn, how->number, members[i]);
    snprintf(number, sizeof number, " %d", members[i]);
    strcat(members[i] == rank || !access(path, F_OK) ? waiting : missing, number);
  }
  return ffi_error(frame, "emulated TPU: an %s was not reached within %.0f s by rank%s, for which rank%s "
                   "waited; on a TPU that hangs", what, wait_s(), missing, waiting);
}

static bool combine(const Frame *frame, const How *how, const int *members, int n, Message *const *given) {
  const char *kind = how->kind;
  size_t before = 0; /* bytes of the arguments before this one */
  int me = 0;
  for (int m = 0; m < n; m++) if (members[m] == rank) me = m;
  bool is_tuple = !strcmp(kind, "all-to-all") && frame->results.count > 1;
  for (int i = 0; i < frame->arguments.count; i++) {
    const Array *in = frame->arguments.of[i], *out = frame->results.of[is_tuple ? 0 : i];
    size_t size = bytes_of(in), outer = 1, inner = TYPES[in->type].bytes;
    for (int d = 0; d < in->rank; d++) *(d < how->dimension ? &outer : &inner) *= in->dims[d];
    size_t piece = inner / n; /* of what a chip splits */
    char *to = out->data;
    if (!strcmp(kind, "collective-permute")) memset(to, 0, size);
    for (int m = 0; m < n; m++) {
      const char *from = given[m]->data + before;
      if (!strcmp(kind, "all-reduce")) {
        if (!m) memcpy(to, from, size);
        else if (!fold(how->reduction, in->type, to, from, size)) return false;
      } else if (!strcmp(kind, "collective-permute")) {
        for (const char *pair = how->groups; *pair; pair += 3)
          if (pair[0] - '0' == members[m] && pair[1] - '0' == rank) memcpy(to, from, size);
      } else if (is_tuple) {
        if (i == me) memcpy(frame->results.of[m]->data, from, size);
      } else for (size_t o = 0; o < outer; o++) {
        const char *my_piece = from + (o * n + me) * piece;
        if (!strcmp(kind, "all-gather")) memcpy(to + (o * n + m) * inner, from + o * inner, inner);
        else if (!strcmp(kind, "all-to-all")) memcpy(to + (o * n + m) * piece, my_piece, piece);
        else if (!m) memcpy(to + o * piece, my_piece, piece);
        else if (!fold(how->reduction, in->type, to + o * piece, my_piece, piece)) return false;
      }
    }
    before += size;
  }
  return true;
}

static void *meet(Frame *frame) {
  if (frame->extensions && frame->extensions->type == FFI_METADATA) {
    Metadata *asked = (Metadata *)frame->extensions;
    asked->of->version.major = 0;
    asked->of->version.minor = 1;
    return NULL;
  }
  How how = {0};
  Message head = {0}, *given[MOST] = {0};
  char path[4096];
  int members[MOST];
  for (int i = 0; i < frame->arguments.count; i++) {
    int type = frame->arguments.of[i]->type;
    if (type < 0 || type >= COUNT(TYPES) || !TYPES[type].bytes)
      return ffi_error(frame, "emulated TPU: no collective of XLA's type %d", type);
  }
  if (!read_how(frame, &how)) return ffi_error(frame, "emulated TPU: a collective without its attribute");
  int n = members_of(&how, members), seen = 0;
  long turn = __sync_add_and_fetch(&turns[how.number % COLLECTIVES], 1);
  describe(frame, &how, head.what, sizeof head.what);
  head.unread = n;
  path_of(path, turn, how.number, rank);
  if (!give(frame, &head, path))
    return ffi_error(frame, "emulated TPU: cannot write %s: %s; is it full?", path, strerror(errno));
  size_t sizes[MOST];
  void *error = NULL;
  double started = now();
  while (seen < n && !error) {
    path_of(path, turn, how.number, members[seen]);
    if ((given[seen] = take(path, &sizes[seen]))) {
      if (strcmp(given[seen]->what, head.what))
        error = ffi_error(frame, "emulated TPU: rank %d is in an %s, rank %d in an %s: every rank must call "
                          "the same collectives in the same order", rank, head.what, members[seen],
                          given[seen]->what);
      seen++;
    } else if (now() - started > wait_s()) error = missed(frame, &how, head.what, members, n, turn);
    else usleep(now() - started < 1 ? 100 : 2000);
  }
  if (!error && !combine(frame, &how, members, n, given))
    error = ffi_error(frame, "emulated TPU: no %s by %s of this type", how.kind, how.reduction);
  for (int m = 0; m < seen; m++) {
    path_of(path, turn, how.number, members[m]);
    if (__sync_sub_and_fetch(&given[m]->unread, 1) == 0) unlink(path);
    munmap(given[m], sizes[m]);
  }
  return error;
}

/* The library's only name */

static const Api *give_up(const char *why) {
  fprintf(stderr, "emulated TPU: %s\n", why);
  _exit(1);
}

__attribute__((visibility("default"))) const Api *GetPjrtApi(void) {
  static const struct { int place; Call call; } CALLS[] = {
      {ERROR_DESTROY, error_destroy}, {ERROR_MESSAGE, error_message}, {ERROR_GET_CODE, error_code},
      {PLUGIN_ATTRIBUTES, plugin_attributes},
      {CLIENT_CREATE, client_create}, {CLIENT_PLATFORM_NAME, platform_name},
      {CLIENT_PROCESS_INDEX, process_index}, {CLIENT_DEVICES, devices},
      {CLIENT_ADDRESSABLE_DEVICES, addressable_devices}, {CLIENT_LOOKUP_DEVICE, lookup},
      {CLIENT_LOOKUP_ADDRESSABLE_DEVICE, lookup}, {CLIENT_ADDRESSABLE_MEMORIES, addressable_memories},
      {CLIENT_COMPILE, compile}, {CLIENT_BUFFER_FROM_HOST, buffer_from_host},
      {DESCRIPTION_ID, description_id}, {DESCRIPTION_PROCESS_INDEX, description_process},
      {DESCRIPTION_KIND, kind}, {DEVICE_IS_ADDRESSABLE, is_addressable},
      {DEVICE_MEMORY_STATS, memory_stats}, {LOADED_DESTROY, loaded_destroy}, {LOADED_EXECUTE, execute},
      {BUFFER_DESTROY, buffer_destroy}, {BUFFER_DELETE, buffer_delete},
      {BUFFER_COPY_TO_DEVICE, copy_to_device}, {BUFFER_COPY_TO_MEMORY, copy_to_memory}};
  if (ours) return ours;
  const char *plugin = getenv("TPUKIT_EMULATE_PLUGIN");
  directory = getenv("TPUKIT_EMULATE_DIRECTORY");
  if (!plugin || !directory) return give_up("start it by `tpukit emulate`");
  void *library = dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
  const Api *(*get)(void) = library ? (const Api *(*)(void))dlsym(library, "GetPjrtApi") : NULL;
  if (!get || !(real = get())) return give_up(dlerror());
  if (real->version.major || real->size < offsetof(Api, call) + CALLS_AT_LEAST * sizeof(Call))
    return give_up("the plugin has another interface");
  limit = number_of("TPUKIT_EMULATE_HBM", 15.75 * (1 << 30));
  for (Extension *e = real->extensions; e; e = e->next) {
    if (e->type != EXTENSION_FFI) continue;
    RegisterArgs one = {offsetof(RegisterArgs, traits) + sizeof one.traits, COLLECTIVE, strlen(COLLECTIVE),
                        meet, "Host", 4, 0};
    must(((FfiExtension *)e)->handler(&one));
  }
  ours = malloc(real->size);
  memcpy(ours, real, real->size);
  for (int i = 0; i < COUNT(CALLS); i++) ours->call[CALLS[i].place] = CALLS[i].call;
  return ours;
}
