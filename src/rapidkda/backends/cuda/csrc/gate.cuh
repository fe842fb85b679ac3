// From raw gate logits to log2 decays.
#pragma once
#include "params.cuh"

// What a lane needs to activate its four channels. A log2 decay is a strength times the amplitude. Amplitudes are kept
// finite and not zero, so that neither 0 nor -inf times one is a NaN.
struct GateChannels {
    float amplitude;     // bounded: in the sigmoid, -exp(A_log) log2(e); else -exp(A_log), or -1 for log decays
    float bias[4];       // unbounded: in base 2
    float bound;         // bounded: lower_bound in base 2; else the largest strength
};

constexpr float kMaxLogAmplitude = 80.f;
constexpr float kMinAmplitude = 1e-30f;
// Smallest log2 decay of a token for unbounded gates, see decays.cuh.
constexpr float kMinLog2Decay = -26.f;

DEVICE GateChannels gate_channels(const Params& p, int head, int channel, bool bounded) {
    GateChannels c;
    const float log_amplitude = p.A_log ? fminf(p.A_log[head], kMaxLogAmplitude) : 0.f;
    const float amplitude = -fmaxf(exp2_approx(log_amplitude * kLog2E), kMinAmplitude);
    const float bias_scale = bounded ? 1.f : kLog2E;
#pragma unroll
    for (int i = 0; i < 4; i++) c.bias[i] = p.dt_bias ? p.dt_bias[head * 128 + channel + i] * bias_scale : 0.f;
    c.amplitude = bounded ? amplitude * kLog2E : p.flags & kRawGate ? amplitude : -1.f;
    c.bound = bounded ? p.lower_bound * kLog2E : kMinLog2Decay * reciprocal(c.amplitude);
    return c;
}

// The fraction of the bound, sigmoid(exp(A_log) * (g + bias)).
DEVICE float bounded_fraction(float g, float bias, float amplitude) {
    return reciprocal(1.f + exp2_approx((g + bias) * amplitude));
}

// softplus(x) log2(e) = max(y, 0) + log2(1 + 2^-|y|) of y = x log2(e), at most `most`. The logarithm is a polynomial
// without constant term in 2^-|y|, within 8.4e-6 of its value everywhere: slow decays need it small, not only near.
DEVICE float softplus_strength(float g, float bias, float most) {
    const float y = fmaf(g, kLog2E, bias);
    const float t = exp2_approx(-fabsf(y));
    float s = fmaf(t, -0.034435887f, 0.14603285f);
    s = fmaf(t, s, -0.30303621f);
    s = fmaf(t, s, 0.46917409f);
    s = fmaf(t, s, -0.72042614f);
    s = fmaf(t, s, 1.44268286f);
    return fminf(fmaf(t, s, fmaxf(y, 0.f)), most);
}
DEVICE float log_decay_strength(float g, float most) { return fminf(g * -kLog2E, most); }
