// The extended operators as a custom-op library of ONNX Runtime (1.17 and later), CPU.
//
// The bits are those of quark/core/quantize.py and of the ONNX functions in quark/onnx_ops; the formulas stand there.
// Compile without contraction of a * b + c: every operation below is rounded on its own.
// No header of ONNX Runtime is needed: its C interface is a table of functions that never loses or moves a slot.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "native.h"

// ---- The interface of ONNX Runtime ---------------------------------------------------------------------------------

struct OrtStatus;
using Function = void (*)();
using Api = const Function*;  // OrtApi: a table of functions
struct ApiBase {
  Api (*get_api)(uint32_t version);
  const char* (*get_version)();
};
constexpr uint32_t kApiVersion = 17;
enum Type : int { kAny = 0, kFloat = 1, kUint8 = 2, kInt8 = 3, kUint16 = 4, kInt16 = 5, kInt32 = 6, kHalf = 10,
                  kUint32 = 12, kBfloat16 = 16 };

struct CustomOp {  // OrtCustomOp of API version 17
  uint32_t version;
  void* (*create)(const CustomOp*, Api, const void*);
  const char* (*name)(const CustomOp*);
  const char* (*provider)(const CustomOp*);
  int (*input_type)(const CustomOp*, size_t);
  size_t (*input_count)(const CustomOp*);
  int (*output_type)(const CustomOp*, size_t);
  size_t (*output_count)(const CustomOp*);
  void (*compute)(void*, void*);
  void (*destroy)(void*);
  int (*input_characteristic)(const CustomOp*, size_t);
  int (*output_characteristic)(const CustomOp*, size_t);
  int (*input_memory)(const CustomOp*, size_t);
  int (*variadic_input_arity)(const CustomOp*);
  int (*variadic_input_homogeneity)(const CustomOp*);
  int (*variadic_output_arity)(const CustomOp*);
  int (*variadic_output_homogeneity)(const CustomOp*);
  OrtStatus* (*create_v2)(const CustomOp*, Api, const void*, void**);
  OrtStatus* (*compute_v2)(void*, void*);
  OrtStatus* (*infer_shape)(const CustomOp*, void*);
  int (*start_version)(const CustomOp*);
  int (*end_version)(const CustomOp*);
};

template <class... Args>
OrtStatus* call(Api api, int slot, Args... args) {
  return reinterpret_cast<OrtStatus* (*)(Args...)>(api[slot])(args...);
}
template <class T>
void release(Api api, int slot, T* object) {
  reinterpret_cast<void (*)(T*)>(api[slot])(object);
}
OrtStatus* failure(Api api, const std::string& message) { return call(api, 0, 1, message.c_str()); }

#define TRY(expression) \
  if (OrtStatus* status_ = (expression)) return status_

struct Tensor {
  void* data = nullptr;
  int type = 0;
  std::vector<int64_t> shape;
  int64_t size = 1;
};

OrtStatus* input(Api api, void* context, size_t index, Tensor& tensor) {
  const void* value = nullptr;
  void* info = nullptr;
  size_t rank = 0;
  TRY(call(api, 90, static_cast<const void*>(context), index, &value));
  TRY(call(api, 51, const_cast<void*>(value), &tensor.data));
  TRY(call(api, 65, value, &info));
  OrtStatus* status = call(api, 60, static_cast<const void*>(info), &tensor.type);
  if (!status) status = call(api, 61, static_cast<const void*>(info), &rank);
  tensor.shape.resize(rank);
  if (!status) status = call(api, 62, static_cast<const void*>(info), tensor.shape.data(), rank);
  release(api, 99, info);
  for (int64_t length : tensor.shape) tensor.size *= length;
  return status;
}

OrtStatus* output(Api api, void* context, const std::vector<int64_t>& shape, void** data) {
  void* value = nullptr;
  TRY(call(api, 91, context, size_t{0}, shape.data(), shape.size(), &value));
  return call(api, 51, value, data);
}

int64_t integer_attribute(Api api, const void* info, const char* name, int64_t value) {
  if (OrtStatus* absent = call(api, 86, info, name, &value)) release(api, 93, absent);
  return value;
}

std::string text_attribute(Api api, const void* info, const char* name, const char* value) {
  char buffer[64] = "";
  size_t size = sizeof(buffer);
  if (OrtStatus* absent = call(api, 87, info, name, static_cast<char*>(buffer), &size)) {
    release(api, 93, absent);
    return value;
  }
  return std::string(buffer, strnlen(buffer, sizeof(buffer)));
}

// body(first, last) over [0, count) on the session's threads, in pieces of about `grain` items.
template <class Body>
OrtStatus* parallel(Api api, void* context, int64_t count, int64_t grain, const Body& body) {
  struct Work {
    const Body& body;
    int64_t count, piece;
  } work{body, count, std::max<int64_t>(1, grain)};
  const size_t pieces = static_cast<size_t>((count + work.piece - 1) / work.piece);
  if (pieces <= 1) {
    if (count > 0) body(int64_t{0}, count);
    return nullptr;
  }
  void (*run)(void*, size_t) = [](void* user, size_t index) {
    const Work& w = *static_cast<Work*>(user);
    const int64_t first = static_cast<int64_t>(index) * w.piece;
    w.body(first, std::min(first + w.piece, w.count));
  };
  return call(api, 274, static_cast<const void*>(context), run, pieces, size_t{0}, static_cast<void*>(&work));
}
constexpr int64_t kGrain = 32768;  // elements that are worth a thread

// ---- Numbers -------------------------------------------------------------------------------------------------------

inline uint32_t bits_of(float x) { uint32_t u; std::memcpy(&u, &x, 4); return u; }
inline float float_of(uint32_t u) { float x; std::memcpy(&x, &u, 4); return x; }
inline float clip(float x, float low, float high) { return x < low ? low : (x > high ? high : x); }
inline double clip(double x, double low, double high) { return x < low ? low : (x > high ? high : x); }
inline float with_sign(float magnitude, float sign) {
  return float_of((bits_of(magnitude) & 0x7fffffffu) | (bits_of(sign) & 0x80000000u));
}

// Half to even, |x| < 2^22 (2^51): the last bit of x + 1.5 * 2^23 is the unit.
inline float round_even(float x) { return with_sign((x + 12582912.0f) - 12582912.0f, x); }
inline double round_even(double x) { return (x + 6755399441055744.0) - 6755399441055744.0; }
// Half away from zero; the addend is the number below 0.5, for 0.49999997 stays under 1.
inline float round_away(float x) {
  const float magnitude = float_of(bits_of(x) & 0x7fffffffu) + 0.49999997f;
  return with_sign(static_cast<float>(static_cast<int32_t>(magnitude)), x);
}

// Half up; doubled first, as x + 0.5 would round 0.49999997 up to 1.
inline float round_up(float x) { return std::floor((std::floor(x * 2.0f) + 1.0f) * 0.5f); }

// 2^e for e in [-149, 128]; 2^128 is infinity.
inline float exp2_of(int32_t e) {
  return e < -126 ? float_of(1u << (e + 149)) : float_of(static_cast<uint32_t>(e + 127) << 23);
}

struct Bfloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

inline void store(float x, Bfloat16& q) {
  const uint32_t u = bits_of(x);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  q.bits = static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}
inline float load(Bfloat16 q) { return float_of(static_cast<uint32_t>(q.bits) << 16); }

inline void store(float x, Half& q) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffffu;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  // Adding 0.5 leaves a subnormal half in the last bits, rounded by the addition itself.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t half = magnitude >= 0x47800000u ? special : (magnitude < 0x38800000u ? subnormal : normal);
  q.bits = static_cast<uint16_t>(half | ((u >> 16) & 0x8000u));
}
inline float load(Half q) {
  const uint32_t magnitude = (q.bits & 0x7fffu) << 13, sign = (q.bits & 0x8000u) << 16;
  const uint32_t normal = magnitude + 0x38000000u;
  const float subnormal = float_of(magnitude + 0x38800000u) - 6.103515625e-05f;
  const uint32_t special = magnitude + 0x70000000u;
  const uint32_t u = magnitude >= 0x0f800000u ? special : (magnitude < 0x00800000u ? bits_of(subnormal) : normal);
  return float_of(u | sign);
}

// ---- ExtendedQuantizeLinear, ExtendedDequantizeLinear --------------------------------------------------------------

template <class T>
struct Integer {  // arithmetic in W: float holds 16-bit integers, double 32-bit ones
  using W = std::conditional_t<sizeof(T) == 4, double, float>;
  static double zero(const void* p, int64_t i) { return static_cast<double>(static_cast<const T*>(p)[i]); }
  static void quantize(const float* x, T* q, int64_t n, float scale, double zero) {
    constexpr W low = static_cast<W>(std::numeric_limits<T>::min()), high = static_cast<W>(std::numeric_limits<T>::max());
    constexpr W far = sizeof(T) == 4 ? W(1ll << 40) : W(1 << 20);  // beyond every code, within round_even
    const W inverse = W(1) / static_cast<W>(scale), z = static_cast<W>(zero);
    for (int64_t i = 0; i < n; ++i) {
      const W v = static_cast<W>(x[i]) * inverse;
      const W code = clip(round_even(clip(v, -far, far)) + z, low, high);
      q[i] = static_cast<T>(x[i] == x[i] ? code : z);
    }
  }
  static void dequantize(const T* q, float* y, int64_t n, float scale, double zero) {
    const W s = static_cast<W>(scale), z = static_cast<W>(zero);
    for (int64_t i = 0; i < n; ++i) y[i] = static_cast<float>((static_cast<W>(q[i]) - z) * s);
  }
};

template <class T>
struct Float {  // the zero point names the type only
  static double zero(const void*, int64_t) { return 0; }
  static void quantize(const float* x, T* q, int64_t n, float scale, double) {
    if (scale == 1.0f)
      for (int64_t i = 0; i < n; ++i) store(x[i], q[i]);
    else
      for (int64_t i = 0; i < n; ++i) store(x[i] / scale, q[i]);
  }
  static void dequantize(const T* q, float* y, int64_t n, float scale, double) {
    if (scale == 1.0f)
      for (int64_t i = 0; i < n; ++i) y[i] = load(q[i]);
    else
      for (int64_t i = 0; i < n; ++i) y[i] = load(q[i]) * scale;
  }
};

struct Kernel {
  Api api;
  int64_t axis, block, rounding;
  int bits, mbits, emin, emax;
  float low, high;
  enum Rule { kLinear, kOcp, kBfp, kRaisedBfp, kMicro } rule;
  bool floats;
};

// run(first element, count, scale, zero) for each stretch of [first, last) under one scale.
template <class Body>
void stretches(int64_t first, int64_t last, int64_t inner, int64_t channels, const Body& body) {
  while (first < last) {
    const int64_t channel = channels == 1 ? 0 : first / inner % channels;
    const int64_t end = channels == 1 ? last : std::min(last, (first / inner + 1) * inner);
    body(first, end - first, channel);
    first = end;
  }
}

template <class T, class Codec, bool quantizes>
OrtStatus* linear(const Kernel& kernel, void* context, const Tensor& x, const Tensor& scale, const Tensor& zero) {
  const int64_t rank = static_cast<int64_t>(x.shape.size());
  int64_t inner = 1;
  if (scale.size != 1) {
    const int64_t axis = kernel.axis < 0 ? kernel.axis + rank : kernel.axis;
    if (axis < 0 || axis >= rank || x.shape[axis] != scale.size)
      return failure(kernel.api, "com.amd.quark: the scale has " + std::to_string(scale.size) +
                                     " values, which is not the length of axis " + std::to_string(kernel.axis) + ".");
    for (int64_t i = axis + 1; i < rank; ++i) inner *= x.shape[i];
  }
  if (zero.size != scale.size) return failure(kernel.api, "com.amd.quark: scale and zero point differ in size.");
  void* out = nullptr;
  TRY(output(kernel.api, context, x.shape, &out));
  const float* scales = static_cast<const float*>(scale.data);
  return parallel(kernel.api, context, x.size, kGrain, [&](int64_t first, int64_t last) {
    stretches(first, last, inner, scale.size, [&](int64_t start, int64_t n, int64_t channel) {
      const double z = Codec::zero(zero.data, channel);
      if constexpr (quantizes)
        Codec::quantize(static_cast<const float*>(x.data) + start, static_cast<T*>(out) + start, n, scales[channel], z);
      else
        Codec::dequantize(static_cast<const T*>(x.data) + start, static_cast<float*>(out) + start, n, scales[channel], z);
    });
  });
}

template <bool quantizes>
OrtStatus* compute_linear(void* self, void* context) {
  const Kernel& kernel = *static_cast<Kernel*>(self);
  Tensor x, scale, zero;
  TRY(input(kernel.api, context, 0, x));
  TRY(input(kernel.api, context, 1, scale));
  TRY(input(kernel.api, context, 2, zero));
  if (!quantizes && x.type != zero.type) return failure(kernel.api, "com.amd.quark: x and zero point differ in type.");
  switch (zero.type) {
    case kUint8: return linear<uint8_t, Integer<uint8_t>, quantizes>(kernel, context, x, scale, zero);
    case kInt8: return linear<int8_t, Integer<int8_t>, quantizes>(kernel, context, x, scale, zero);
    case kUint16: return linear<uint16_t, Integer<uint16_t>, quantizes>(kernel, context, x, scale, zero);
    case kInt16: return linear<int16_t, Integer<int16_t>, quantizes>(kernel, context, x, scale, zero);
    case kUint32: return linear<uint32_t, Integer<uint32_t>, quantizes>(kernel, context, x, scale, zero);
    case kInt32: return linear<int32_t, Integer<int32_t>, quantizes>(kernel, context, x, scale, zero);
    case kHalf: return linear<Half, Float<Half>, quantizes>(kernel, context, x, scale, zero);
    case kBfloat16: return linear<Bfloat16, Float<Bfloat16>, quantizes>(kernel, context, x, scale, zero);
  }
  return failure(kernel.api, "com.amd.quark: no extended Q/DQ of element type " + std::to_string(zero.type) + ".");
}

// ---- MXQuantizeDequantize, BFPQuantizeDequantize -------------------------------------------------------------------

inline int32_t exponent(uint32_t magnitude) { return static_cast<int32_t>(magnitude >> 23) - 127; }

// The step of a block (of a pair, where `own` is the pair's magnitude) from the bits of its largest magnitude.
inline float step_of(const Kernel& k, uint32_t amax, int32_t highest, uint32_t own) {
  if (amax > 0x7f800000u) return float_of(0x7fc00000u);
  const int32_t e = exponent(amax);
  if (k.rule == Kernel::kOcp) {
    const int32_t shared = std::min(e, 127);
    return exp2_of(k.floats ? std::max(shared - k.emax, -127) : shared - k.emax);
  }
  if (k.rule == Kernel::kMicro) return exp2_of(e - (exponent(own) < e ? 1 : 0) - (k.bits - 2));
  const float step = exp2_of(e - 6);
  if (k.rule == Kernel::kBfp) return step;
  const bool over = float_of(static_cast<uint32_t>(highest)) >= 127.5f * step || e == 128;
  return over ? step * 2 : step;
}

template <bool floats, int mode>
inline float element(float x, float step, const Kernel& k) {
  float v = clip(x / step, floats ? k.low : -1000.0f, floats ? k.high : 1000.0f);
  if (!floats) return clip(mode == 2 ? round_even(v) : mode ? round_up(v) : round_away(v), k.low, k.high) * step;
  const float power = float_of(bits_of(v) & 0x7f800000u), least = float_of(static_cast<uint32_t>(k.emin + 127) << 23);
  const float spacing = (power > least ? power : least) * float_of(static_cast<uint32_t>(127 - k.mbits) << 23);
  v /= spacing;
  return round_even(v) * spacing * step;
}

constexpr int64_t kTile = 128;

// Bits of floats compare like integers, NaN on top: the largest magnitude, and the largest value where it is positive.
inline void see(float x, uint32_t& amax, int32_t& highest) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffffu;
  amax = magnitude > amax ? magnitude : amax;
  highest = static_cast<int32_t>(u) > highest ? static_cast<int32_t>(u) : highest;
}

// One block of adjacent values.
template <bool floats, int mode>
void contiguous_block(const Kernel& kernel, const float* x, float* y, int64_t count) {
  const Kernel k = kernel;
  uint32_t amax = 0;
  int32_t highest = 0;
  for (int64_t j = 0; j < count; ++j) see(x[j], amax, highest);
  if (k.rule != Kernel::kMicro) {
    const float step = step_of(k, amax, highest, 0);
    for (int64_t j = 0; j < count; ++j) y[j] = element<floats, mode>(x[j], step, k);
    return;
  }
  float step[kTile];
  for (int64_t start = 0; start < count; start += kTile) {
    const int64_t n = std::min(kTile, count - start);
    for (int64_t j = 0; j < n; j += 2) {
      uint32_t own = 0;
      see(x[start + j], own, highest);
      see(x[start + std::min(j + 1, n - 1)], own, highest);
      step[j] = step[j + 1] = step_of(k, amax, highest, own);
    }
    for (int64_t j = 0; j < n; ++j) y[start + j] = element<floats, mode>(x[start + j], step[j], k);
  }
}

// `width` blocks side by side: a block is a column, whose values are `inner` apart.
template <bool floats, int mode>
void column_blocks(const Kernel& kernel, const float* x, float* y, int64_t count, int64_t width, int64_t inner) {
  const Kernel k = kernel;
  uint32_t amax[kTile] = {}, own[kTile];
  int32_t highest[kTile] = {};
  float step[kTile];
  for (int64_t j = 0; j < count; ++j)
    for (int64_t w = 0; w < width; ++w) see(x[j * inner + w], amax[w], highest[w]);
  const int64_t part = k.rule == Kernel::kMicro ? 2 : count;
  for (int64_t start = 0; start < count; start += part) {
    const int64_t end = std::min(start + part, count);
    std::fill(own, own + width, 0u);
    if (k.rule == Kernel::kMicro)
      for (int64_t j = start; j < end; ++j)
        for (int64_t w = 0; w < width; ++w) own[w] = std::max(own[w], bits_of(x[j * inner + w]) & 0x7fffffffu);
    for (int64_t w = 0; w < width; ++w) step[w] = step_of(k, amax[w], highest[w], own[w]);
    for (int64_t j = start; j < end; ++j)
      for (int64_t w = 0; w < width; ++w) y[j * inner + w] = element<floats, mode>(x[j * inner + w], step[w], k);
  }
}

template <bool floats, int mode>
void blocks(const Kernel& k, const float* x, float* y, int64_t count, int64_t width, int64_t inner) {
  if (inner == 1)
    contiguous_block<floats, mode>(k, x, y, count);
  else
    column_blocks<floats, mode>(k, x, y, count, width, inner);
}

OrtStatus* compute_blocks(void* self, void* context) {
  const Kernel& kernel = *static_cast<Kernel*>(self);
  Tensor x;
  TRY(input(kernel.api, context, 0, x));
  const int64_t rank = static_cast<int64_t>(x.shape.size()), axis = kernel.axis < 0 ? kernel.axis + rank : kernel.axis;
  if (axis < 0 || axis >= rank)
    return failure(kernel.api, "com.amd.quark: axis " + std::to_string(kernel.axis) + " of a tensor of " +
                                   std::to_string(rank) + " dimensions.");
  void* out = nullptr;
  TRY(output(kernel.api, context, x.shape, &out));
  if (x.size == 0) return nullptr;
  int64_t outer = 1, inner = 1;
  for (int64_t i = 0; i < axis; ++i) outer *= x.shape[i];
  for (int64_t i = axis + 1; i < rank; ++i) inner *= x.shape[i];
  const int64_t length = x.shape[axis], groups = (length + kernel.block - 1) / kernel.block;
  const int64_t tiles = (inner + kTile - 1) / kTile, grain = kGrain / (kernel.block * std::min(inner, kTile)) + 1;
  const auto run = kernel.floats          ? blocks<true, 2>
                   : kernel.rounding == 2 ? blocks<false, 2>
                                          : (kernel.rounding ? blocks<false, 1> : blocks<false, 0>);
  return parallel(kernel.api, context, outer * groups * tiles, grain, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) {
      const int64_t tile = item % tiles, group = item / tiles % groups, row = item / tiles / groups;
      const int64_t offset = (row * length + group * kernel.block) * inner + tile * kTile;
      run(kernel, static_cast<const float*>(x.data) + offset, static_cast<float*>(out) + offset,
          std::min(kernel.block, length - group * kernel.block), std::min(kTile, inner - tile * kTile), inner);
    }
  });
}

// ---- Attributes ----------------------------------------------------------------------------------------------------

struct Element {
  const char* name;
  int ebits, mbits, emax;
  float high;
};
constexpr Element kElements[] = {{"fp8_e5m2", 5, 2, 15, 57344.0f}, {"fp8_e4m3", 4, 3, 8, 448.0f},
                                 {"fp6_e3m2", 3, 2, 4, 28.0f},     {"fp6_e2m3", 2, 3, 2, 7.5f},
                                 {"fp4_e2m1", 2, 1, 2, 6.0f},      {"int8", 0, 0, 6, 127.0f}};

OrtStatus* create_linear(const CustomOp*, Api api, const void* info, void** kernel) {
  *kernel = new Kernel{api, integer_attribute(api, info, "axis", 1)};
  return nullptr;
}

OrtStatus* create(Kernel k, const void* info, int64_t block, void** kernel) {
  k.axis = integer_attribute(k.api, info, "axis", 1);
  k.block = integer_attribute(k.api, info, "block_size", block);
  k.rounding = integer_attribute(k.api, info, "rounding_mode", 0);
  if (k.block < 1) return failure(k.api, "com.amd.quark: block_size must be at least 1.");
  if (k.rounding < 0 || k.rounding > 2) return failure(k.api, "com.amd.quark: rounding_mode must be 0, 1 or 2.");
  *kernel = new Kernel(k);
  return nullptr;
}

OrtStatus* create_mx(const CustomOp*, Api api, const void* info, void** kernel) {
  const std::string name = text_attribute(api, info, "element_dtype", "int8");
  for (const Element& e : kElements)
    if (name == e.name) {
      Kernel k{api};
      k.rule = Kernel::kOcp;
      k.floats = e.ebits > 0;
      k.mbits = e.mbits;
      k.emin = 2 - (1 << std::max(e.ebits - 1, 0));
      k.emax = e.emax;
      k.low = k.floats ? -e.high : -e.high - 1;
      k.high = e.high;
      return create(k, info, 32, kernel);
    }
  return failure(api, "MXQuantizeDequantize: no element_dtype " + name + ".");
}

OrtStatus* create_bfp(const CustomOp*, Api api, const void* info, void** kernel) {
  const std::string method = text_attribute(api, info, "bfp_method", "to_bfp");
  const int64_t width = integer_attribute(api, info, "bit_width", 16);
  const bool plain = method == "to_bfp" && width == 16;
  const bool micro = method == "to_bfp_prime" && (width == 11 || width == 13 || width == 16) &&
                     integer_attribute(api, info, "sub_block_size", 2) == 2 &&
                     integer_attribute(api, info, "sub_block_shift_bits", 1) == 1;
  if ((!plain && !micro) || integer_attribute(api, info, "convert_to_bfloat_before_bfp", 0))
    return failure(api, "BFPQuantizeDequantize: possible: to_bfp with bit_width 16; to_bfp_prime with 11, 13 or 16 in "
                        "pairs that shift by one bit.");
  Kernel k{api};
  const bool raised = integer_attribute(api, info, "use_compiler_version_cpu_kernel", 0);
  k.rule = !plain ? Kernel::kMicro : raised ? Kernel::kRaisedBfp : Kernel::kBfp;
  k.bits = static_cast<int>(width) - 8;
  k.high = static_cast<float>((1 << (k.bits - 1)) - 1);
  k.low = plain && raised ? -128.0f : -k.high;
  return create(k, info, plain ? 8 : 16, kernel);
}

// ---- Registration --------------------------------------------------------------------------------------------------

struct Named : CustomOp {
  const char* label;
  int inputs[3];
  size_t count;
  int result;
};

Named named(const char* label, std::vector<int> inputs, int result, decltype(CustomOp::create_v2) create_v2,
            decltype(CustomOp::compute_v2) compute_v2) {
  Named op{};
  op.label = label;
  op.count = inputs.size();
  std::copy(inputs.begin(), inputs.end(), op.inputs);
  op.result = result;
  op.version = kApiVersion;
  op.name = [](const CustomOp* self) { return static_cast<const Named*>(self)->label; };
  op.provider = [](const CustomOp*) -> const char* { return "CPUExecutionProvider"; };
  op.input_type = [](const CustomOp* self, size_t i) { return static_cast<const Named*>(self)->inputs[i]; };
  op.input_count = [](const CustomOp* self) { return static_cast<const Named*>(self)->count; };
  op.output_type = [](const CustomOp* self, size_t) { return static_cast<const Named*>(self)->result; };
  op.output_count = [](const CustomOp*) { return size_t{1}; };
  op.destroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  op.input_characteristic = op.output_characteristic = [](const CustomOp*, size_t) { return 0; };
  op.input_memory = [](const CustomOp*, size_t) { return 0; };
  op.variadic_input_arity = op.variadic_output_arity = [](const CustomOp*) { return 1; };
  op.variadic_input_homogeneity = op.variadic_output_homogeneity = [](const CustomOp*) { return 1; };
  op.start_version = [](const CustomOp*) { return 1; };
  op.end_version = [](const CustomOp*) { return 1; };
  op.create_v2 = create_v2;
  op.compute_v2 = compute_v2;
  return op;
}

EXPORT OrtStatus* RegisterCustomOps(void* options, const ApiBase* base) {
  const Api api = base->get_api(kApiVersion);
  static const Named ops[] = {
      named("ExtendedQuantizeLinear", {kFloat, kFloat, kAny}, kAny, create_linear, compute_linear<true>),
      named("ExtendedDequantizeLinear", {kAny, kFloat, kAny}, kFloat, create_linear, compute_linear<false>),
      named("MXQuantizeDequantize", {kFloat}, kFloat, create_mx, compute_blocks),
      named("BFPQuantizeDequantize", {kFloat}, kFloat, create_bfp, compute_blocks),
  };
  void* domain = nullptr;  // lives as long as the process: sessions refer to it
  TRY(call(api, 26, "com.amd.quark", &domain));
  for (const Named& op : ops) TRY(call(api, 27, domain, static_cast<const CustomOp*>(&op)));
  return call(api, 28, options, domain);
}
