// Rows of activations as int8 codes, in two passes: the range of each row, then
//     code = clamp(round_half_even(x * inverse) + zero, low, high) - shift
// Values are bfloat16 or float32; arithmetic is float32.
#include <cstdint>
#include <cstring>

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

#if defined(__GNUC__) && defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

// Within the function of each CPU, so that it is compiled for that CPU.
#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#else
#define INLINE inline
#endif

namespace {
inline float as_float(int32_t pattern) {
    float value;
    std::memcpy(&value, &pattern, 4);
    return value;
}
inline float widened(int16_t pattern) { return as_float(int32_t(uint32_t(uint16_t(pattern)) << 16)); }
inline float widened(int32_t pattern) { return as_float(pattern); }

// The range of each row as floats; NaN where a value is. Patterns are compared as integers, negative ones turned
// round, because compilers vectorise that; their order is that of the floats.
template <typename Pattern, Pattern kMagnitude, Pattern kInfinity>
INLINE void ranges(const Pattern* x, int64_t rows, int64_t columns, float* low,
                                                  float* high) {
    for (int64_t row = 0; row < rows; ++row, x += columns) {
        Pattern least = kMagnitude, most = -kMagnitude, largest = 0;
        for (int64_t i = 0; i < columns; ++i) {
            const Pattern magnitude = x[i] & kMagnitude;
            const Pattern ordered = x[i] < 0 ? Pattern(-magnitude) : magnitude;
            least = ordered < least ? ordered : least;
            most = ordered > most ? ordered : most;
            largest = magnitude > largest ? magnitude : largest;
        }
        const auto value = [&](Pattern ordered) {
            return ordered < 0 ? -widened(Pattern(-ordered)) : widened(ordered);
        };
        low[row] = largest > kInfinity ? widened(largest) : value(least);
        high[row] = largest > kInfinity ? widened(largest) : value(most);
    }
}

// Each row has its own inverse and zero, or all have the first (step 0). `rounder` is 1.5 * 2^23, whose sum with a
// smaller float has no bits below 1: the addition rounds half to even. No code needs more than 1024.
template <typename Pattern>
INLINE void codes(const Pattern* x, int64_t rows, int64_t columns, const float* inverse,
                                                 const float* zero, int64_t step, float low, float high, float shift,
                                                 int8_t* out) {
    constexpr float rounder = 12582912.0f;
    for (int64_t row = 0; row < rows; ++row, x += columns, out += columns) {
        const float by = inverse[row * step], plus = zero[row * step];
        for (int64_t i = 0; i < columns; ++i) {
            float value = widened(x[i]) * by;
            value = value > -1024.0f ? value : -1024.0f;
            value = value < 1024.0f ? value : 1024.0f;
            value = (value + rounder) - rounder + plus;
            value = value > low ? value : low;
            value = value < high ? value : high;
            out[i] = int8_t(int32_t(value - shift));
        }
    }
}
}  // namespace

EXPORT FOR_EACH_CPU void ranges_bfloat16(const int16_t* x, int64_t rows, int64_t columns, float* low, float* high) {
    ranges<int16_t, 0x7fff, 0x7f80>(x, rows, columns, low, high);
}

EXPORT FOR_EACH_CPU void ranges_float32(const int32_t* x, int64_t rows, int64_t columns, float* low, float* high) {
    ranges<int32_t, 0x7fffffff, 0x7f800000>(x, rows, columns, low, high);
}

EXPORT FOR_EACH_CPU void codes_bfloat16(const int16_t* x, int64_t rows, int64_t columns, const float* inverse,
                                        const float* zero, int64_t step, float low, float high, float shift,
                                        int8_t* out) {
    codes(x, rows, columns, inverse, zero, step, low, high, shift, out);
}

EXPORT FOR_EACH_CPU void codes_float32(const int32_t* x, int64_t rows, int64_t columns, const float* inverse,
                                       const float* zero, int64_t step, float low, float high, float shift,
                                       int8_t* out) {
    codes(x, rows, columns, inverse, zero, step, low, high, shift, out);
}
