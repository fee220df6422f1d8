// What Python calls, by ctypes; rollout/native/library.py mirrors the structures.
#include "decoder.h"
#include "panels.h"
#include "sampler.h"

namespace {

using rollout::Bf16;
using rollout::Team;

// Calls f with a null pointer of the element type.
template <class F>
auto typed(int32_t is_bf16, F f) {
    return is_bf16 ? f(static_cast<Bf16*>(nullptr)) : f(static_cast<float*>(nullptr));
}

}  // namespace

extern "C" {

// Of the structures that Python mirrors, in the order of rollout/native/library.py.
int64_t rollout_sizes[] = {sizeof(rollout::Linear), sizeof(rollout::Layer), sizeof(rollout::Model),
                                 sizeof(rollout::Pages),  sizeof(rollout::Batch), sizeof(rollout::Draws)};

Team* rollout_team_new(int32_t threads) { return new Team(threads); }

void rollout_team_delete(Team* team) { delete team; }

int64_t rollout_workspace_bytes(const rollout::Model* model, int32_t is_bf16, int32_t rows, int32_t threads) {
    return typed(is_bf16, [&](auto* type) {
        return rollout::workspace_bytes<std::remove_pointer_t<decltype(type)>>(*model, rows, threads);
    });
}

void rollout_forward(Team* team, const rollout::Model* model, int32_t is_bf16, const rollout::Pages* pages,
                     const rollout::Batch* batch, void* workspace, void* hidden) {
    typed(is_bf16, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        rollout::Forward<T> forward(*team, *model, *pages, *batch, workspace);
        team->run([&](int member) { forward.run(member, static_cast<T*>(hidden)); });
    });
}

void rollout_logits(Team* team, const rollout::Model* model, int32_t is_bf16, const void* hidden, int32_t rows,
                    void* out) {
    typed(is_bf16, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        rollout::logits<T>(*team, *model, static_cast<const T*>(hidden), rows, static_cast<T*>(out));
    });
}

void rollout_pack(Team* team, const void* rows, int32_t count, int32_t steps, void* panels, void* copy) {
    rollout::pack(*team, static_cast<const char*>(rows), count, steps, static_cast<uint32_t*>(panels),
                  static_cast<char*>(copy));
}

void rollout_unpack(Team* team, const void* panels, int32_t count, int32_t steps, void* rows) {
    rollout::unpack(*team, static_cast<const uint32_t*>(panels), count, steps, static_cast<char*>(rows));
}

int64_t rollout_histogram_bytes() { return sizeof(rollout::Histogram); }

void rollout_sample(Team* team, int32_t is_bf16, const rollout::Draws* draws, void* logits, void* histograms) {
    typed(is_bf16, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        rollout::sample<T>(*team, *draws, static_cast<T*>(logits), static_cast<rollout::Histogram*>(histograms));
    });
}

}  // extern "C"
