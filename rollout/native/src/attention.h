// Causal attention over paged KV, for a tile of queries that share a KV head.
//
// Keys are reduced in blocks of 64 absolute positions by an online softmax in fp32 (Milakov and Gimelshein,
// arXiv 1805.02867). The bits of a query depend on itself and its own context only: not on the other queries of the
// tile, nor on page size, so that prefill in any chunks and decode steps agree. Positions behind the tile's last one
// read the sequence's first key, so what stale pages hold, NaN included, reaches nobody.
//
// Query m of a tile is head m % groups of token m / groups.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace rollout {

constexpr int kBlock = 64;
constexpr int kTileQueries = 48;
constexpr int kMostGroups = 256;

#ifdef __AVX512F__
constexpr int kScoreRows = 12, kMixRows = 4;
#else
constexpr int kScoreRows = 6, kMixRows = 1;
#endif

struct Pages {
    void* base;
    int64_t page_stride;   // elements
    int64_t layer_stride;  // elements; a layer's keys, then at half of it its values, [page_tokens, kv_heads, head_dim]
    int32_t page_tokens;
};

struct Heads {
    int32_t heads, kv_heads, head_dim;

    int groups() const { return heads / kv_heads; }
    int padded() const { return (head_dim + kLanes - 1) / kLanes * kLanes; }
    // Tokens whose queries make one tile.
    int tile_tokens() const { return std::max(1, kTileQueries / groups()); }
    int tile_queries() const { return tile_tokens() * groups(); }
};

// The keys and values of one layer and KV head, of one sequence.
template <class T>
struct Context {
    const T* keys;
    const T* values;
    const int32_t* table;
    int64_t page_stride;
    int64_t token_stride;
    int page_tokens;

    // Calls f(i, offset) for the positions start + i, 0 <= i < count.
    template <class F>
    ROLLOUT_INLINE void each(int start, int count, F f) const {
        int page = start / page_tokens, slot = start % page_tokens;
        int64_t at = table[page] * page_stride + slot * token_stride;
        for (int i = 0;; at += token_stride) {
            f(i, at);
            if (++i == count) return;
            if (++slot == page_tokens) {
                slot = 0;
                at = table[++page] * page_stride - token_stride;
            }
        }
    }

    // Have the cache fetch `bytes` of the keys, and as much of the values, of sixteen positions, but not past `last`.
    ROLLOUT_INLINE void fetch(int start, int last, int bytes) const {
        each(start, std::min(kLanes, last + 1 - start), [&](int, int64_t at) {
            const char* const key = reinterpret_cast<const char*>(keys + at);
            const char* const value = reinterpret_cast<const char*>(values + at);
            for (int line = 0; line < bytes; line += 64) {
                prefetch(key + line);
                prefetch(value + line);
            }
        });
    }
};

// What one thread works in.
struct AttentionScratch {
    uint32_t* keys;  // [kBlock / kLanes, words of a head, kLanes]
    float* values;   // [kBlock, padded]
    float* scores;   // [queries, kBlock]
    float* out;      // [queries, padded]
    float* top;      // [queries]
    float* mass;     // [queries]

    static int64_t floats(const Heads& h) {
        const int64_t queries = h.tile_queries();
        return 2 * kBlock * h.padded() + queries * (kBlock + h.padded() + 2) + 64;
    }

    AttentionScratch(float* memory, const Heads& h) {
        const int64_t queries = h.tile_queries();
        keys = reinterpret_cast<uint32_t*>(memory);
        values = memory + kBlock * h.padded();
        out = values + kBlock * h.padded();
        scores = out + queries * h.padded();
        top = scores + queries * kBlock;
        mass = top + queries;
    }
};

// Rows become columns.
ROLLOUT_INLINE void transpose(U32 (&rows)[kLanes]) {
#define ROLLOUT_EXCHANGE(distance)                                        \
    {                                                                     \
        const U32 id = (U32)lane_ids();                                   \
        const U32 upper = (id & distance) != 0 ? U32{} + 1 : U32{};       \
        const U32 low = id + upper * (kLanes - distance);                 \
        const U32 high = id + distance + upper * (kLanes - distance);     \
        _Pragma("GCC unroll 16")                                         \
        for (int i = 0; i < kLanes; i++)                                  \
            if (!(i & distance)) {                                        \
                const U32 a = rows[i], b = rows[i | distance];            \
                rows[i] = __builtin_shuffle(a, b, low);                   \
                rows[i | distance] = __builtin_shuffle(a, b, high);       \
            }                                                             \
    }
    ROLLOUT_EXCHANGE(8)
    ROLLOUT_EXCHANGE(4)
    ROLLOUT_EXCHANGE(2)
    ROLLOUT_EXCHANGE(1)
#undef ROLLOUT_EXCHANGE
}

// scores[row, 16 * parts] = the products of `rows` queries with that many keys.
template <class T, int rows, int parts>
void score_rows(const uint32_t* const* queries, const uint32_t* keys, int words, float* scores) {
    F32 acc[rows][parts] = {};
    for (int w = 0; w < words; w++) {
        U32 k[parts];
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) k[p] = load_as<U32>(keys + (p * words + w) * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const uint32_t query = queries[r][w];
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) acc[r][p] = dot<T>(acc[r][p], query, k[p]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < parts; p++) store(scores + r * kBlock + p * kLanes, acc[r][p]);
}

template <class T, int rows = kScoreRows>
void score(int wanted, const uint32_t* const* queries, const uint32_t* keys, int words, int parts, float* scores) {
    if constexpr (rows > 1) {
        if (wanted < rows) return score<T, rows - 1>(wanted, queries, keys, words, parts, scores);
    }
    int p = 0;
    for (; p + 2 <= parts; p += 2)
        score_rows<T, rows, 2>(queries, keys + p * words * kLanes, words, scores + p * kLanes);
    if (p < parts) score_rows<T, rows, 1>(queries, keys + p * words * kLanes, words, scores + p * kLanes);
}

// out[row] = out[row] * decay[row] + weights[row] . values, for `rows` rows and some vectors of a head. value(t) is
// where those of token t are.
template <int rows, int vectors, class Value>
void mix_rows(const float* weights, int tokens, int padded, const float* decay, float* out, Value value) {
    F32 acc[rows][vectors];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) acc[r][v] = load(out + r * padded + v * kLanes) * decay[r];
    for (int t = 0; t < tokens; t++) {
        F32 values[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) values[v] = load(value(t) + v * kLanes);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[r][v] = fused(splat(weights[r * kBlock + t]), values[v], acc[r][v]);
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(out + r * padded + v * kLanes, acc[r][v]);
}

template <int rows = kMixRows, class Value>
void mix(int wanted, const float* weights, int tokens, int padded, const float* decay, float* out, Value value) {
    if constexpr (rows > 1) {
        if (wanted < rows) return mix<rows - 1>(wanted, weights, tokens, padded, decay, out, value);
    }
    int h = 0;
    for (; h + 4 * kLanes <= padded; h += 4 * kLanes)
        mix_rows<rows, 4>(weights, tokens, padded, decay, out + h, [&](int t) { return value(t) + h; });
    for (; h < padded; h += kLanes)
        mix_rows<rows, 1>(weights, tokens, padded, decay, out + h, [&](int t) { return value(t) + h; });
}

// Sixteen keys, word by word, and where their values are; those behind `last` are the first of the context.
template <class T>
void gather(const Context<T>& context, const Heads& h, int start, int last, uint32_t* keys, const T** values) {
    const int words = h.head_dim / kWord<T>, known = std::min(kLanes, last + 1 - start);
    int64_t at[kLanes];
    context.each(start, known, [&](int i, int64_t offset) { at[i] = offset; });
    for (int i = known; i < kLanes; i++) at[i] = context.table[0] * context.page_stride;
    for (int i = 0; i < kLanes; i++) values[i] = context.values + at[i];
    int w = 0;
    for (; w + kLanes <= words; w += kLanes) {
        U32 block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) block[i] = load_as<U32>(context.keys + at[i] + w * kWord<T>);
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; i++) store_as(keys + (w + i) * kLanes, block[i]);
    }
    for (; w < words; w++)
        for (int i = 0; i < kLanes; i++)
            std::memcpy(keys + w * kLanes + i, context.keys + at[i] + w * kWord<T>, sizeof(uint32_t));
}

// Attention of `tokens` neighbouring tokens' queries of one KV head. The queries of the first one start at
// `queries`; tokens are `query_stride` elements apart there and `out_stride` in `out`. Token t looks at positions
// 0 ... first + t. Calls ahead(p) before it reads positions 16p ... 16p + 15.
template <class T, class Ahead>
void attend(const Heads& h, const Context<T>& context, const T* queries, int64_t query_stride, T* out,
            int64_t out_stride, int first, int tokens, const AttentionScratch& scratch, Ahead ahead) {
    const int groups = h.groups(), count = tokens * groups, last = first + tokens - 1, padded = h.padded();
    const int words = h.head_dim / kWord<T>;
    const float scale = 1.0f / __builtin_sqrtf(h.head_dim);
    const uint32_t* query[kMostGroups];
    float decay[kMostGroups];
    const T* values[kBlock];
    const bool widened = count > kMixRows || padded > h.head_dim;
    for (int m = 0; m < count; m++) {
        query[m] = reinterpret_cast<const uint32_t*>(queries + m / groups * query_stride + m % groups * h.head_dim);
        scratch.top[m] = -kInfinity;
        scratch.mass[m] = 0;
    }
    std::memset(scratch.out, 0, (int64_t)count * padded * sizeof(float));
    for (int start = 0; start <= last; start += kBlock) {
        const int parts = std::min(kBlock, last + 1 - start + kLanes - 1) / kLanes;
        // Queries that see nothing of this block come first in the tile.
        const int blind = std::max(0, start - first) * groups;
        for (int part = 0; part < parts; part++) {
            ahead(start / kLanes + part);
            gather(context, h, start + part * kLanes, last, scratch.keys + part * words * kLanes,
                   values + part * kLanes);
        }
        for (int t = 0; widened && t < parts * kLanes; t++)
            each_vector(h.head_dim, [&](int v, int n) {
                store(scratch.values + t * padded + v, load_up_to(values[t] + v, n));
            });
        for (int m = blind; m < count; m += kScoreRows)
            score<T>(std::min(kScoreRows, count - m), query + m, scratch.keys, words, parts,
                     scratch.scores + m * kBlock);
        for (int m = blind; m < count; m++) {
            float* scores = scratch.scores + m * kBlock;
            const I32 end = I32{} + (first + m / groups - start);
            F32 seen[kBlock / kLanes], highest = splat(-kInfinity);
            for (int part = 0; part < parts; part++) {
                seen[part] = lane_ids() + part * kLanes <= end ? load(scores + part * kLanes) * scale
                                                               : splat(-kInfinity);
                highest = larger(seen[part], highest);
            }
            const float top = std::max(scratch.top[m], largest(highest));
            F32 mass{};
            for (int part = 0; part < parts; part++) {
                const F32 weight = exp(seen[part] - top);
                store(scores + part * kLanes, weight);
                mass += weight;
            }
            decay[m] = top == scratch.top[m] ? 1.0f : exp(splat(scratch.top[m] - top))[0];
            scratch.mass[m] = scratch.mass[m] * decay[m] + sum(mass);
            scratch.top[m] = top;
        }
        const auto mix_all = [&](auto value) {
            for (int m = blind; m < count; m += kMixRows)
                mix(std::min(kMixRows, count - m), scratch.scores + m * kBlock, parts * kLanes, padded, decay + m,
                    scratch.out + m * padded, value);
        };
        if (widened)
            mix_all([&](int t) { return scratch.values + t * padded; });
        else
            mix_all([&](int t) { return values[t]; });
    }
    for (int m = 0; m < count; m++) {
        T* row = out + m / groups * out_stride + m % groups * h.head_dim;
        const float mass = scratch.mass[m];
        each_vector(h.head_dim, [&](int v, int n) { store_up_to(row + v, load(scratch.out + m * padded + v) / mass, n); });
    }
}

}  // namespace rollout
