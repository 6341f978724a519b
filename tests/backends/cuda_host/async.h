// Barriers in shared memory that count arrivals and bytes, and copies that arrive at them or that a thread waits for.
//
// A copy's destination is NaN from its start until it lands, which is as late as the scheduler likes.
#pragma once
#include "machine.h"

namespace machine {

struct Barrier { uint16_t expected, pending; int32_t bytes : 31; uint32_t phase : 1; };
static_assert(sizeof(Barrier) == 8);

inline Barrier& barrier_at(uint32_t at) {
  Barrier& barrier = *reinterpret_cast<Barrier*>(shared_at(at, 8));
  if (barrier.expected == 0 || barrier.expected > 2048) FAIL("block %d: there is no barrier at %u", block->number, at);
  return barrier;
}
inline void end_phase(Barrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.expected;
  barrier.phase ^= 1;
}
inline void arrive(uint32_t at, int bytes) {
  Barrier& barrier = barrier_at(at);
  if (barrier.pending == 0) FAIL("block %d: barrier at %u has more arrivals than its %d", block->number, at, barrier.expected);
  barrier.bytes += bytes;
  barrier.pending--;
  end_phase(barrier);
  yield();
}
inline void wait_for_phase(uint32_t at, uint32_t parity) {
  if (parity > 1) FAIL("block %d: parity %u", block->number, parity);
  yield();
  wait_until([=] { return barrier_at(at).phase != parity; }, "barrier", at, parity);
}

inline void poison(uint32_t to, int bytes) { std::memset(shared_at(to, bytes), 0xff, bytes); }

// Ordinary writes, which products and copies do not see before the thread has published them.
inline void mark_written(uint32_t to, int bytes) {
  std::fill_n(block->writer.begin() + (to - FIRST_SHARED), bytes, uint16_t(current->number + 1));
  current->unpublished.emplace_back(to, bytes);
}
inline void publish() {
  for (const auto& [to, bytes] : current->unpublished)
    for (int i = 0; i < bytes; i++) {
      uint16_t& writer = block->writer[to - FIRST_SHARED + i];
      if (writer == current->number + 1) writer = 0;
    }
  current->unpublished.clear();
}
template <typename T>
void write_shared(uint32_t to, T x) {
  std::memcpy(shared_at(to, sizeof x), &x, sizeof x);
  mark_written(to, sizeof x);
}

inline void start_copy(uint32_t to, const void* from, int bytes, int read) {
  if (read && reinterpret_cast<uintptr_t>(from) % bytes) FAIL("block %d: a copy is not aligned", block->number);
  poison(to, bytes);
  current->copies.push_back({to, from, bytes, read});
}
inline void end_copies(const std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    char* const to = shared_at(copy.to, copy.bytes);
    std::memset(to, 0, copy.bytes);
    if (copy.read) std::memcpy(to, copy.from, copy.read);
    mark_written(copy.to, copy.bytes);
  }
}
inline void end_copy_groups(size_t left) {
  for (auto& groups = current->copy_groups; groups.size() > left; groups.pop_front()) end_copies(groups.front());
}

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline int box_bytes(const Map& map) { return int(map.pitches[0]) * map.box[0] * map.box[1] * map.box[2] * map.box[3]; }

inline void start_box(uint32_t to, const void* map, uint32_t barrier, int dim, int token, int head, int request) {
  BoxCopy copy{{}, to, barrier, {dim, token, head, request}};
  std::memcpy(&copy.map, map, sizeof copy.map);
  if (to % 128 || copy.map.box[0] * copy.map.pitches[0] != 128 || copy.map.swizzle != 3) FAIL("block %d: a box at %u", block->number, to);
  poison(to, box_bytes(copy.map));
  block->copies.push_back(copy);
  yield();
}
// Called by the scheduler.
inline void land(const BoxCopy& copy) {
  const Map& map = copy.map;
  const auto inside = [&](int axis, uint32_t i) { return copy.from[axis] >= -int(i) && copy.from[axis] + i < map.sizes[axis]; };
  for (uint32_t row = 0; row < map.box[1] * map.box[2] * map.box[3]; row++) {
    const uint32_t at[] = {row % map.box[1], row / map.box[1] % map.box[2], row / map.box[1] / map.box[2]};
    const bool exists = inside(1, at[0]) && inside(2, at[1]) && inside(3, at[2]);
    for (uint32_t i = 0; i < map.box[0]; i++) {
      const int size = int(map.pitches[0]);
      int64_t offset = size * int64_t(copy.from[0] + int(i));
      for (int axis = 1; axis < 4; axis++) offset += int64_t(map.pitches[axis]) * (copy.from[axis] + int(at[axis - 1]));
      uint16_t number = 0;
      if (exists && inside(0, i)) std::memcpy(&number, reinterpret_cast<const char*>(map.address) + offset, size);
      const uint32_t to = swizzled(copy.to + row * 128 + size * i);
      char* const place = shared_at(to, size);
      if (place[0] != char(0xff) || place[size - 1] != char(0xff)) note_failure("block %d: %u is written while a copy is under way", block->number, to);
      std::memcpy(place, &number, size);
      std::fill_n(block->writer.begin() + (to - FIRST_SHARED), size, uint16_t(0));
    }
  }
  Barrier& barrier = barrier_at(copy.barrier);
  barrier.bytes -= box_bytes(map);
  end_phase(barrier);
}

}  // namespace machine
