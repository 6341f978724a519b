// Formats of numbers, and what a warp does with matrices in its registers.
#pragma once
#include <immintrin.h>

#include "async.h"

namespace machine {

inline float as_float(uint32_t x) { float y; std::memcpy(&y, &x, 4); return y; }
inline uint32_t as_bits(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }

// x rounded to nearest even, with so many bits and multiples of 2 ** least.
inline double rounded(double x, int bits, int least) {
  if (!std::isfinite(x) || x == 0.0) return x;
  const double unit = std::ldexp(1.0, std::max(std::ilogb(x) - bits + 1, least));
  return std::nearbyint(x / unit) * unit;
}
struct Bf16 {
  static constexpr int BYTES = 2;
  static double load(uint32_t bits) { return as_float(bits << 16); }
  static uint32_t store(double x) {
    if (std::isnan(x)) return 0x7fff;
    return as_bits(float(std::abs(x) >= 0x1.ffp127 ? std::copysign(HUGE_VAL, x) : rounded(x, 8, -133))) >> 16;
  }
};
struct Fp16 {
  static constexpr int BYTES = 2;
  static double load(uint32_t bits) { return _cvtsh_ss(uint16_t(bits)); }
  static uint32_t store(double x) { return _cvtss_sh(float(rounded(x, 11, -24)), 0); }
};
template <typename T> double low(uint32_t x) { return T::load(x & 0xffff); }
template <typename T> double high(uint32_t x) { return T::load(x >> 16); }
template <typename T> uint32_t pack(double x, double y) { return T::store(x) | T::store(y) << 16; }

inline double e4m3(uint32_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  if ((byte & 127) == 127) return std::nan("");
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return byte & 128 ? -size : size;
}

struct E4m3 {
  static constexpr int BYTES = 1;
  static double load(uint32_t bits) { return e4m3(bits); }
  static uint32_t store(double x) {
    if (std::isnan(x)) return 0x7f;
    const double size = std::min(rounded(std::abs(x), 4, -9), 448.0);
    const int exponent = size < 0x1p-6 ? -6 : std::ilogb(size), steps = int(std::ldexp(size, 3 - exponent));
    return uint32_t(std::signbit(x)) << 7 | (steps < 8 ? steps : uint32_t(exponent + 7) << 3 | (steps - 8));
  }
};

// Rows of a are queries of lanes 4i to 4i + 3, as the PTX manual has it; sums are rounded once.
template <typename T>
void mma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
         float c0, float c1, float c2, float c3) {
  auto words = meet_warp({a0, a1, a2, a3, b0, b1});
  const int i = lane() / 4, j = lane() % 4;
  const auto entry = [&](int row, int column) {
    double sum = 0.0;
    for (int x = 0; x < 4; x++) {
      for (int half = 0; half < 2; half++) {
        const uint32_t a = uint32_t(words[row % 8 * 4 + x][row / 8 + 2 * half]), b = uint32_t(words[column * 4 + x][4 + half]);
        sum += low<T>(a) * low<T>(b) + high<T>(a) * high<T>(b);
      }
    }
    return sum;
  };
  d0 = float(c0 + entry(i, 2 * j)), d1 = float(c1 + entry(i, 2 * j + 1));
  d2 = float(c2 + entry(i + 8, 2 * j)), d3 = float(c3 + entry(i + 8, 2 * j + 1));
}

inline void load_matrices(bool transposed, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  auto words = meet_warp({address});
  const int i = lane() / 4, j = lane() % 4;
  uint32_t* const results[] = {&r0, &r1, &r2, &r3};
  for (int matrix = 0; matrix < 4; matrix++) {
    const auto unit = [&](int row, int column) {
      return uint32_t(reinterpret_cast<const uint16_t*>(shared_at(uint32_t(words[8 * matrix + row][0]), 16))[column]);
    };
    *results[matrix] = transposed ? unit(2 * j, i) | unit(2 * j + 1, i) << 16 : unit(i, 2 * j) | unit(i, 2 * j + 1) << 16;
  }
}

// Each lane has two units of a row of each matrix, or of a column.
inline void store_matrices(bool transposed, uint32_t address, const uint32_t (&units)[4]) {
  auto words = meet_warp({address});
  const int i = lane() / 4, j = lane() % 4;
  for (int matrix = 0; matrix < 4; matrix++)
    for (int half = 0; half < 2; half++) {
      const int row = transposed ? 2 * j + half : i, column = transposed ? i : 2 * j + half;
      const uint32_t at = uint32_t(words[8 * matrix + row][0]);
      shared_at(at, 16);
      write_shared(at + 2 * column, uint16_t(units[matrix] >> 16 * half));
    }
}

}  // namespace machine
