// From raw gate logits to log2 decays.
#pragma once
#include "params.cuh"

// What a lane needs to activate its two channels. Amplitudes are kept finite and not zero, so that neither 0 nor -inf
// times one is a NaN.
struct GateChannels {
    float amplitude;     // -exp(A_log) log2(e)
    float bias0, bias1;
    float bound;         // bounded: lower_bound in base 2
};

constexpr float kMaxLogAmplitude = 80.f;
constexpr float kMinAmplitude = 1e-30f;
// Smallest log2 decay of a token for unbounded gates, see intra_unbounded.cuh.
constexpr float kMinLog2Decay = -26.f;

DEVICE GateChannels gate_channels(const Params& p, int head, int channel) {
    GateChannels c;
    const float log_amplitude = p.A_log ? fminf(p.A_log[head], kMaxLogAmplitude) : 0.f;
    c.amplitude = -fmaxf(exp2_approx(log_amplitude * kLog2E), kMinAmplitude) * kLog2E;
    c.bias0 = p.dt_bias ? p.dt_bias[head * 128 + channel] : 0.f;
    c.bias1 = p.dt_bias ? p.dt_bias[head * 128 + channel + 1] : 0.f;
    c.bound = p.lower_bound * kLog2E;
    return c;
}

// The fraction of the bound, sigmoid(exp(A_log) * (g + bias)).
DEVICE float bounded_fraction(float g, float bias, float amplitude) {
    return reciprocal(1.f + exp2_approx((g + bias) * amplitude));
}

// softplus(x) = max(x, 0) + log1p(exp(-|x|)), and log1p by its series where 1 + t would lose t: slow decays live there.
DEVICE float softplus_log2_decay(float g, float bias, float amplitude) {
    const float x = g + bias;
    const float t = exp2_approx(-kLog2E * fabsf(x));
    const float series = t * (1.f + t * (-0.5f + t * (0.33333333f - 0.25f * t)));
    const float log1p = t < 0.03125f ? series : kLn2 * log2_approx(1.f + t);
    return fmaxf(amplitude * (fmaxf(x, 0.f) + log1p), kMinLog2Decay);
}
