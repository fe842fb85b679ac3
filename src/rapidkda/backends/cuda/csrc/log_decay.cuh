// From gate inputs to natural log decays, to nearly fp32: steps keep them in records and apply them again.
#pragma once
#include "step_params.cuh"

constexpr float kLargest = 3.4028234e38f;

// log(1 + exp(x)) with small relative error on both tails; slow decays live on the left one.
DEVICE float softplus(float x) {
    const float y = exp2_approx(fminf(x, 20.f) * kLog2E);
    const float series = y * (1.f - y * (0.5f - y * (0.33333333f - y * 0.25f))), direct = log2_approx(1.f + y) * kLn2;
    const float curved = y < 0.03f ? series : direct;
    return x > 20.f ? x : curved;
}

// exp(A_log) of a head, finite: an infinite one would turn a zero logit into NaN.
DEVICE float gate_amplitude(float A_log) { return fminf(exp2_approx(A_log * kLog2E), kLargest); }

// What a lane needs of a head to activate its four channels.
struct HeadGate {
    Quad bias;
    float amplitude;
};

// Gate inputs of a few tokens to their log decays, in place. One branch for all of them: the kind is the call's.
template <int kCount>
DEVICE void log_decays(const StepParams& p, Quad* g, HeadGate gate) {
    if (p.flags & kBoundedGate) {
        const float slope = fmaxf(-kLog2E * gate.amplitude, -kLargest);
        auto activate = [&](float x, float bias) -> float {
            return p.lower_bound * reciprocal(1.f + exp2_approx((x + bias) * slope));
        };
#pragma unroll
        for (int i = 0; i < kCount; i++)
            g[i] = Quad{activate(g[i].x, gate.bias.x), activate(g[i].y, gate.bias.y), activate(g[i].z, gate.bias.z),
                        activate(g[i].w, gate.bias.w)};
    } else if (p.flags & kSoftplusGate) {
#pragma unroll
        for (int i = 0; i < kCount; i++)
            g[i] = Quad{-gate.amplitude * softplus(g[i].x + gate.bias.x), -gate.amplitude * softplus(g[i].y + gate.bias.y),
                        -gate.amplitude * softplus(g[i].z + gate.bias.z), -gate.amplitude * softplus(g[i].w + gate.bias.w)};
    }
}

DEVICE float natural_exp(float x) { return exp2_approx(x * kLog2E); }
