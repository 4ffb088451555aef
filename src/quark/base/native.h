// What every C++ file of the package says of its compiler.
#pragma once

// A function that Python calls.
#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Compiled once for each kind of CPU; the one of this machine is chosen when the library is loaded.
#if defined(__GNUC__) && defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

// INLINE: within the function of each CPU, so that it is compiled for that CPU. SOON: will be read, so fetch it.
#if defined(__GNUC__)
#define INLINE inline __attribute__((always_inline))
#define RESTRICT __restrict__
#define SOON(address) __builtin_prefetch(address)
#else
#define INLINE inline
#define RESTRICT
#define SOON(address)
#endif
