// Rows of words, as a checkpoint has them, into the panels that linear.h reads, and back.
//
// The 32 rows of a panel are one run of memory, and the panel is another. To pack, each line is read once, while the
// cache fetches those of the next panel, and written once, past the caches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "linear.h"
#include "team.h"
#include "vector.h"

namespace rollout {

typedef uint32_t Quad __attribute__((vector_size(16)));

constexpr int kQuad = 4;
constexpr int kLineBytes = 64;
constexpr int kLineWords = kLineBytes / sizeof(uint32_t);

// To 16 aligned bytes that are not read again soon. Others may read them after settle().
ROLLOUT_INLINE void stream(void* to, Quad v) {
#ifdef __SSE2__
    asm volatile("movntdq %1, %0" : "=m"(*static_cast<Quad*>(to)) : "x"(v));
#else
    store_as(to, v);
#endif
}

ROLLOUT_INLINE void settle() {
#ifdef __SSE2__
    asm volatile("sfence" : : : "memory");
#endif
}

// Four words of each of four rows become four rows of each of four words.
ROLLOUT_INLINE void transpose(Quad (&v)[kQuad]) {
    const Quad low{0, 4, 1, 5}, high{2, 6, 3, 7}, first{0, 1, 4, 5}, last{2, 3, 6, 7};
    const Quad a = __builtin_shuffle(v[0], v[1], low), b = __builtin_shuffle(v[0], v[1], high);
    const Quad c = __builtin_shuffle(v[2], v[3], low), d = __builtin_shuffle(v[2], v[3], high);
    v[0] = __builtin_shuffle(a, c, first);
    v[1] = __builtin_shuffle(a, c, last);
    v[2] = __builtin_shuffle(b, d, first);
    v[3] = __builtin_shuffle(b, d, last);
}

// As memcpy does.
inline void stream_run(const char* from, int64_t bytes, char* to) {
    int64_t i = 0;
    for (; i + kLineBytes <= bytes; i += kLineBytes)
        for (int part = 0; part < kLineBytes; part += sizeof(Quad))
            stream(to + i + part, load_as<Quad>(from + i + part));
    std::memcpy(to + i, from + i, bytes - i);
}

// `columns` rows of `steps` words; the panel's other columns are left as they are. What is at `next` will be
// wanted soon.
inline void pack_panel(const char* rows, int columns, int steps, uint32_t* panel, const char* next) {
    const int64_t stride = (int64_t)steps * sizeof(uint32_t);
    int s = 0;
    for (; columns == kPanel && s + kLineWords <= steps; s += kLineWords) {
        alignas(kLineBytes) uint32_t block[kLineWords][kPanel];
        for (int c = 0; c < kPanel; c += kQuad) {
            for (int q = 0; q < kLineWords; q += kQuad) {
                Quad v[kQuad];
                for (int r = 0; r < kQuad; r++)
                    v[r] = load_as<Quad>(rows + (c + r) * stride + (s + q) * sizeof(uint32_t));
                transpose(v);
                for (int t = 0; t < kQuad; t++) store_as(&block[q + t][c], v[t]);
                prefetch(next);
                next += kLineBytes;
            }
        }
        for (int i = 0; i < kLineWords * kPanel; i += kQuad)
            stream(panel + (int64_t)s * kPanel + i, load_as<Quad>(block[0] + i));
    }
    for (; s < steps; s++)
        for (int c = 0; c < columns; c++)
            panel[(int64_t)s * kPanel + c] = load_as<uint32_t>(rows + c * stride + s * sizeof(uint32_t));
}

// `count` rows of `steps` words each, to whole panels and what of the last one they fill. With `copy` the rows go
// there as they are, too. `panels` and `copy` begin at a cache line.
inline void pack(Team& team, const char* rows, int count, int steps, uint32_t* panels, char* copy) {
    const int64_t words = (int64_t)steps * kPanel, bytes = words * sizeof(uint32_t);
    team.run([&](int) {
        team.share((count + kPanel - 1) / kPanel, [&](int p) {
            const char* from = rows + p * bytes;
            const int columns = std::min(kPanel, count - p * kPanel);
            if (copy) stream_run(from, (int64_t)columns * steps * sizeof(uint32_t), copy + p * bytes);
            pack_panel(from, columns, steps, panels + p * words, from + team.size() * bytes);
            settle();
        });
    });
}

inline void unpack_panel(const uint32_t* panel, int columns, int steps, char* rows) {
    const int64_t stride = (int64_t)steps * sizeof(uint32_t);
    int s = 0;
    for (; columns == kPanel && s + kQuad <= steps; s += kQuad)
        for (int c = 0; c < kPanel; c += kQuad) {
            Quad v[kQuad];
            for (int t = 0; t < kQuad; t++) v[t] = load_as<Quad>(panel + (int64_t)(s + t) * kPanel + c);
            transpose(v);
            for (int r = 0; r < kQuad; r++) store_as(rows + (c + r) * stride + s * sizeof(uint32_t), v[r]);
        }
    for (; s < steps; s++)
        for (int c = 0; c < columns; c++)
            store_as(rows + c * stride + s * sizeof(uint32_t), panel[(int64_t)s * kPanel + c]);
}

// The inverse of pack.
inline void unpack(Team& team, const uint32_t* panels, int count, int steps, char* rows) {
    const int64_t words = (int64_t)steps * kPanel;
    team.run([&](int) {
        team.share((count + kPanel - 1) / kPanel, [&](int p) {
            unpack_panel(panels + p * words, std::min(kPanel, count - p * kPanel), steps,
                         rows + p * words * sizeof(uint32_t));
        });
    });
}

}  // namespace rollout
