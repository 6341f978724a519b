// Matrix products of warpgroups. One runs at any time after all of its threads have asked for it, and reads shared memory then; its
// sums are in registers after a thread has waited for its group.
#pragma once
#include "async.h"

namespace machine {

constexpr uint32_t UNDER_WAY = 0x7fdeadbe;  // a NaN

inline void settle(std::vector<Sums>& sums, long done) {
  for (auto own = sums.begin(); own != sums.end();) {
    if (own->last >= done) {
      ++own;
      continue;
    }
    for (int i = 0; i < own->count; i++) {
      uint32_t bits;
      std::memcpy(&bits, own->registers + i, 4);
      if (bits != UNDER_WAY) FAIL("thread %d: sums are written while a product is under way", current->number);
    }
    std::copy_n(own->values.get(), own->count, own->registers);
    own = sums.erase(own);
  }
}

inline void await_products(int pending) {
  auto& groups = current->product_groups;
  Warpgroup& warpgroup = block->warpgroups[current->number / 128];
  const long wanted = groups.size() > size_t(pending) ? groups[groups.size() - 1 - pending] : 0;
  wait_until([&] { return warpgroup.first >= wanted; }, "products", uint32_t(wanted), uint32_t(warpgroup.first));
  settle(current->sums, wanted);
  current->has_begun_products = false;
}

inline float* take_sums(float* registers, int count, long number) {
  for (Sums& own : current->sums)
    if (own.registers == registers) {
      own.last = number;
      return own.values.get();
    }
  Sums own{registers, count, std::make_unique<float[]>(count), number};
  std::copy_n(registers, count, own.values.get());
  for (int i = 0; i < count; i++) std::memcpy(registers + i, &UNDER_WAY, 4);
  current->sums.push_back(std::move(own));
  return current->sums.back().values.get();
}

inline void start_product(Product asked, float* registers, std::initializer_list<uint32_t> words) {
  const int thread = current->number % 128;
  Warpgroup& warpgroup = block->warpgroups[current->number / 128];
  if (!current->has_begun_products) FAIL("thread %d: a product without a fence before it", current->number);
  const long number = current->products++;
  if (size_t(number - warpgroup.first) >= warpgroup.open.size()) warpgroup.open.push_back(asked);
  Product& product = warpgroup.open[number - warpgroup.first];
  if (product.a != asked.a || product.b != asked.b || product.columns != asked.columns || product.adds != asked.adds)
    FAIL("thread %d: product %ld is not that of its warpgroup", current->number, number);
  product.sums[thread] = take_sums(registers, asked.columns / 2, number);
  std::copy(words.begin(), words.end(), product.words[thread]);
  product.calls++;
}

// Number `along` the common axis of row `across`, by a descriptor: tiles of rows of 128 bytes, swizzled.
inline float operand(uint64_t descriptor, bool runs_across, int across, int along, const Product& product) {
  const uint32_t start = uint32_t(descriptor & 0x3fff) << 4, parts = uint32_t(descriptor >> 16 & 0x3fff) << 4, groups = uint32_t(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) note_failure("block %d: a descriptor of another swizzle", block->number);
  const uint32_t place = runs_across ? across / 64 * parts + across % 64 * 2 + along / 8 * groups + along % 8 * 128
                                     : across / 8 * groups + across % 8 * 128 + along * product.bytes;
  const uint32_t at = swizzled(start + place);
  const char* const from = shared_at(at, product.bytes);
  if (const int writer = block->writer[at - FIRST_SHARED])
    note_failure("block %d: a product reads %u, which thread %d has written and not published", block->number, at, writer - 1);
  uint16_t bits = 0;
  std::memcpy(&bits, from, product.bytes);
  return float(product.load(bits));
}

// Called by the scheduler.
inline void run_product(Product& product) {
  static float a[64][32], b[32][256], sums[64][256];
  const int depth = 32 / product.bytes, bits = 8 * product.bytes, in_word = 4 / product.bytes;
  for (int row = 0; row < 64; row++)
    for (int k = 0; k < depth; k++) {
      const uint32_t word = product.words[row / 16 * 32 + row % 8 * 4 + k % (depth / 2) / in_word][row / 8 % 2 + k / (depth / 2) * 2];
      a[row][k] = product.from_registers ? float(product.load(word >> k % in_word * bits & ((1u << bits) - 1))) : operand(product.a, product.a_across, row, k, product);
    }
  for (int k = 0; k < depth; k++)
    for (int column = 0; column < product.columns; column++) b[k][column] = operand(product.b, product.b_across, column, k, product);
  for (int row = 0; row < 64; row++) {
    std::fill_n(sums[row], product.columns, 0.0f);
    for (int k = 0; k < depth; k++)
      for (int column = 0; column < product.columns; column++) sums[row][column] += a[row][k] * b[k][column];
  }
  for (int thread = 0; thread < 128; thread++)
    for (int i = 0; i < product.columns / 2; i++) {
      const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      float& sum = product.sums[thread][i];
      sum = (product.adds ? sum : 0.0f) + sums[row][column];
    }
}

}  // namespace machine
