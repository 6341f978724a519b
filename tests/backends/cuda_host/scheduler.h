// Which thread runs next, and when copies land and products run: all at random, by a seed.
#pragma once
#include <pthread.h>
#include <signal.h>
#include <sys/time.h>

#include "warpgroup.h"

namespace machine {

// How likely, in a round, a copy lands, a product runs, a warp is passed over, and a warp falls asleep. 0 for copies and products: not
// before all threads wait.
struct Temper { double lands, runs, passes, sleeps; };
inline Temper temper;

inline void (*body)();

constexpr long MOST_ROUNDS = 1000000;
constexpr int SECONDS = 5;  // that a thread may run without a wait

inline long num_resumed;
inline pthread_t host;

// Ends the launch if the same thread runs as the last time.
inline void watch(int) {
  static long seen = -1;
  if (!pthread_equal(pthread_self(), host) || !current) return;
  if (seen == num_resumed) {
    note_failure("block %d: thread %d does not end", block->number, current->number);
    _longjmp(scheduler, 1);
  }
  seen = num_resumed;
}
inline void start_watch(int seconds) {
  struct sigaction action = {};
  action.sa_handler = seconds ? watch : SIG_IGN;
  action.sa_flags = SA_NODEFER;
  sigaction(SIGVTALRM, &action, nullptr);
  const itimerval every = {{seconds, 0}, {seconds, 0}};
  setitimer(ITIMER_VIRTUAL, &every, nullptr);
}

inline void enter() {
  body();
  current->done = true;
  pause();
}

__attribute__((noinline)) inline void resume(Thread& thread) {
  current = &thread;
  num_resumed++;
  if (_setjmp(scheduler)) {
    current = nullptr;
    return;
  }
  if (thread.started) _longjmp(thread.place, 1);
  thread.started = true;
  setcontext(&thread.start);
}

inline std::vector<char*> free_stacks;

inline void prepare(Block& made, int number, int num_threads, size_t shared_bytes) {
  made.number = number, made.shared_bytes = shared_bytes;
  made.memory.assign(shared_bytes + 1024, char(0xff));
  made.shared = made.memory.data() + (1024 - reinterpret_cast<uintptr_t>(made.memory.data()) % 1024) % 1024;
  made.threads = std::vector<Thread>(num_threads);
  made.warps.resize(num_threads / 32);
  for (auto& warp : made.warps) warp.members = 32;
  made.all.members = num_threads;
  made.warpgroups.resize((num_threads + 127) / 128);
  made.writer.assign(shared_bytes, 0);
  made.asleep.assign(num_threads / 32, 0);
  for (int i = 0; i < num_threads; i++) {
    Thread& thread = made.threads[i];
    thread.number = i;
    if (free_stacks.empty()) free_stacks.push_back(new char[STACK]);
    thread.stack = free_stacks.back();
    free_stacks.pop_back();
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = thread.stack;
    thread.start.uc_stack.ss_size = STACK;
    thread.start.uc_link = nullptr;
    makecontext(&thread.start, enter, 0);
  }
}

inline bool is_due(const Warpgroup& warpgroup) { return !warpgroup.open.empty() && warpgroup.open.front().calls == 128; }
inline void run_next(Warpgroup& warpgroup) {
  run_product(warpgroup.open.front());
  warpgroup.open.pop_front();
  warpgroup.first++;
}
inline void land_one(Block& of, size_t i) {
  land(of.copies[i]);
  of.copies.erase(of.copies.begin() + i);
}
inline void enter_block(Block& entered) { block = &entered, shared = entered.shared; }

// Everything of a block that can move does so once, or, unless `all` shall, is passed over; whether something has moved.
inline bool run_round(Block& of, bool all) {
  enter_block(of);
  bool moved = false;
  for (size_t i = of.copies.size(); i-- > 0;)
    if (chance(temper.lands)) land_one(of, i), moved = true;
  for (auto& warpgroup : of.warpgroups)
    while (is_due(warpgroup) && chance(temper.runs)) run_next(warpgroup), moved = true;
  const int num_warps = int(of.warps.size()), first = int(random_number(num_warps)), turn = random_number(2) ? 1 : num_warps - 1;
  if (chance(temper.sleeps)) of.asleep[random_number(num_warps)] = int(random_number(300));
  for (int i = 0; i < num_warps && failure.empty(); i++) {
    const int warp = (first + i * turn) % num_warps;
    if (all) of.asleep[warp] = 0;
    else if (of.asleep[warp] > 0 ? of.asleep[warp]-- : chance(temper.passes)) continue;
    for (int j = 0; j < 32 && failure.empty(); j++) {
      Thread& thread = of.threads[warp * 32 + j];
      if (thread.done || (thread.over && !thread.over(thread.state))) continue;
      resume(thread);
      moved = true;
    }
  }
  return moved;
}

// What is under way goes on where all threads wait for it; false if nothing is.
inline bool go_on(Block& of) {
  enter_block(of);
  std::vector<Warpgroup*> due;
  for (auto& warpgroup : of.warpgroups)
    if (is_due(warpgroup)) due.push_back(&warpgroup);
  const size_t count = of.copies.size() + due.size();
  if (count == 0) return false;
  const size_t i = random_number(uint32_t(count));
  if (i < of.copies.size()) land_one(of, i);
  else run_next(*due[i - of.copies.size()]);
  return true;
}

inline void report_deadlock(Block& of) {
  std::string text = "block " + std::to_string(of.number) + ": its threads wait for each other:";
  const Thread* before = nullptr;
  for (const Thread& thread : of.threads) {
    if (thread.done) continue;
    if (!before || before->what != thread.what || before->at != thread.at || before->more != thread.more)
      text += " from " + std::to_string(thread.number) + " on for " + thread.what + " " + std::to_string(thread.at) + ", " + std::to_string(thread.more) + ";";
    before = &thread;
  }
  if (failure.empty()) failure = text;
}

inline bool has_ended(Block& of) {
  if (!std::all_of(of.threads.begin(), of.threads.end(), [](const Thread& thread) { return thread.done; })) return false;
  if (!of.copies.empty()) note_failure("block %d ends before its copies", of.number);
  for (auto& warpgroup : of.warpgroups)
    if (!warpgroup.open.empty()) note_failure("block %d ends before its products", of.number);
  return true;
}

// Runs blocks in random order, so many side by side.
inline void run_blocks(int blocks, int side_by_side, int num_threads, size_t shared_bytes) {
  std::vector<int> order(blocks);
  for (int i = 0; i < blocks; i++) {
    const int j = int(random_number(i + 1));
    order[i] = order[j], order[j] = i;
  }
  std::vector<std::unique_ptr<Block>> active;
  bool moved = true;
  long rounds = 0;
  for (int next = 0; next < blocks || !active.empty();) {
    for (; next < blocks && int(active.size()) < side_by_side; next++) {
      active.push_back(std::make_unique<Block>());
      prepare(*active.back(), order[next], num_threads, shared_bytes);
    }
    if (++rounds > MOST_ROUNDS) note_failure("the launch does not end");
    const bool all = !moved;
    moved = false;
    for (auto& one : active) moved = run_round(*one, all) || moved;
    if (all && !moved) {
      const size_t first = random_number(uint32_t(active.size()));
      for (size_t i = 0; i < active.size() && !moved; i++) moved = go_on(*active[(first + i) % active.size()]);
      for (auto& one : active)
        if (!moved && !has_ended(*one)) report_deadlock(*one);
    }
    for (size_t i = active.size(); i-- > 0;) {
      if (failure.empty() && !has_ended(*active[i])) continue;
      for (const Thread& thread : active[i]->threads) free_stacks.push_back(thread.stack);
      active.erase(active.begin() + i);
    }
    if (!failure.empty()) return;
  }
}

template <typename A> A argument(const void* from) {
  std::remove_cv_t<A> value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <typename... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(argument<A>(arguments[I])...);
}

// What went wrong, or null. Each kernel is a library of its own, so it is known to `body` as a constant.
template <auto kernel, typename... A>
const char* launch(void (*)(A...), int blocks, int side_by_side, int num_threads, size_t shared_bytes, uint64_t seed, void** arguments) {
  static void** given;
  given = arguments;
  body = [] { call(kernel, given, std::index_sequence_for<A...>()); };
  random_state = seed * 0x9e3779b97f4a7c15 + 0x1234567;
  for (int i = 0; i < 8; i++) random_number(2);
  const double rates[] = {0.0, 0.0, 0.01, 0.2, 1.0}, passes[] = {0.0, 0.3, 0.8};
  temper = {rates[random_number(5)], rates[random_number(5)], passes[random_number(3)], random_number(2) ? 0.01 : 0.0};
  failure.clear();
  num_blocks = blocks;
  host = pthread_self();
  start_watch(SECONDS);
  run_blocks(blocks, side_by_side, num_threads, shared_bytes);
  start_watch(0);
  return failure.empty() ? nullptr : failure.c_str();
}

}  // namespace machine
