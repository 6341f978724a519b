// Blocks of threads on one CPU thread: threads are fibers that take turns where they wait.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

namespace machine {

constexpr uint32_t FIRST_SHARED = 1024;  // address of a block's shared memory: below it lies what the system keeps
constexpr size_t STACK = 256 << 10;

// Where threads exchange 64-bit words: two sets, so that nobody writes what another still reads.
struct Meeting {
  int members = 0, arrived = 0;
  long generation = 0;
  uint64_t words[2][32][16];
};

struct NamedBarrier { int count = 0, arrived = 0; long generation = 0; };

// A copy of one thread, to shared memory, whose end it can wait for.
struct Copy { uint32_t to; const void* from; int bytes, read; };

// A tensor of 16-bit numbers whose boxes are copied; sizes, strides and boxes in the order of dims, tokens, heads, requests.
struct Map { uint64_t address, sizes[4], pitches[4]; uint32_t box[4], swizzle; uint64_t rest[4]; };
static_assert(sizeof(Map) == 128);

struct BoxCopy { Map map; uint32_t to, barrier; int from[4]; };

// Registers that products sum into. The values are here until the thread has waited for them; the registers hold NaN.
struct Sums { float* registers; int count; std::unique_ptr<float[]> values; long last; };

// A product of a warpgroup, 64 rows by columns, over 16 of the common axis.
struct Product {
  int columns;
  bool adds, from_registers, a_across, b_across;
  int bytes;  // of an element
  double (*load)(uint32_t);
  uint64_t a, b;
  int calls = 0;
  float* sums[128];
  uint32_t words[128][4];
};

struct Warpgroup { std::deque<Product> open; long first = 0; };  // `first` products are done

struct Thread {
  ucontext_t start;
  jmp_buf place;
  char* stack;
  bool started = false, done = false;
  int number = 0;
  // What it waits for, by a test that the scheduler makes.
  bool (*over)(void*) = nullptr;
  void* state = nullptr;
  const char* what = "";
  uint32_t at = 0, more = 0;
  std::vector<Copy> copies;
  std::deque<std::vector<Copy>> copy_groups;
  std::vector<std::pair<uint32_t, int>> unpublished;  // places that it has written, and bytes
  long products = 0;
  std::vector<long> product_groups;
  std::vector<Sums> sums;
  bool has_begun_products = false;
};

struct Block {
  int number;
  std::vector<char> memory;
  char* shared;
  size_t shared_bytes;
  std::vector<Thread> threads;
  std::vector<Meeting> warps;
  Meeting all;
  NamedBarrier named[16];
  std::vector<BoxCopy> copies;
  std::vector<Warpgroup> warpgroups;
  std::vector<uint16_t> writer;  // of bytes whose writer has not published them to products and copies: its number and 1
  std::vector<int> asleep;       // rounds that a warp is left out
};

inline Block* block;
inline Thread* current;
inline char* shared;
inline jmp_buf scheduler;
inline std::string failure;
inline uint64_t random_state;
inline int num_blocks;

inline uint32_t random_number(uint32_t below) {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return uint32_t((random_state >> 32) * below >> 32);
}
inline bool chance(double share) { return share > 0 && random_number(1 << 20) < share * (1 << 20); }

__attribute__((noinline)) inline void pause() {
  if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

inline void note_failure(const char* format, ...) {
  if (!failure.empty()) return;
  char text[400];
  va_list parts;
  va_start(parts, format);
  std::vsnprintf(text, sizeof text, format, parts);
  va_end(parts);
  failure = text;
}
// Ends the launch.
#define FAIL(...) (machine::note_failure(__VA_ARGS__), machine::stop())
inline void stop() {
  if (!current) return;
  current->over = nullptr;
  while (true) pause();
}

template <typename F>
void wait_until(F over, const char* what, uint32_t at = 0, uint32_t more = 0) {
  if (over()) return;
  current->over = [](void* state) { return (*static_cast<F*>(state))(); };
  current->state = &over, current->what = what, current->at = at, current->more = more;
  while (!over()) pause();
  current->over = nullptr;
}
// Lets others run, now and then.
inline void yield() {
  if (random_number(4) == 0) pause();
}

// Shared memory by its address.
inline char* shared_at(uint32_t address, int bytes) {
  if (address < FIRST_SHARED || address + bytes > FIRST_SHARED + block->shared_bytes) {
    FAIL("block %d: shared memory has no %d bytes at %u", block->number, bytes, address);
    return block->shared;
  }
  if (bytes <= 16 && address % bytes) FAIL("block %d: %d bytes at %u are not aligned", block->number, bytes, address);
  return block->shared + (address - FIRST_SHARED);
}

// Words of all members; each calls with its own.
inline uint64_t (*meet(Meeting& meeting, std::initializer_list<uint64_t> own, const char* what))[16] {
  const long generation = meeting.generation;
  std::copy(own.begin(), own.end(), meeting.words[generation % 2][current->number % 32]);
  if (++meeting.arrived == meeting.members) {
    meeting.arrived = 0;
    meeting.generation++;
  }
  wait_until([&] { return meeting.generation != generation; }, what);
  return meeting.words[generation % 2];
}
inline uint64_t (*meet_warp(std::initializer_list<uint64_t> own))[16] {
  return meet(block->warps[current->number / 32], own, "its warp");
}
inline int lane() { return current->number % 32; }

// All threads of a warp arrive at a barrier of the block that so many threads reach.
inline void arrive_named(int id, int count, bool waits) {
  meet_warp({});
  NamedBarrier& barrier = block->named[id];
  if (count % 32 || (barrier.arrived && barrier.count != count)) FAIL("named barrier %d: %d threads, and %d", id, barrier.count, count);
  const long generation = barrier.generation;
  barrier.count = count;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    barrier.generation++;
  }
  if (waits) wait_until([&] { return barrier.generation != generation; }, "named barrier", id, count);
}

}  // namespace machine
