// Multiplies and adds in registers as fast as the device can: the yardstick of `bench`, not used by models.
//
// A loop of `rounds` has 16 vec4 products and sums: 128 flops. Eight accumulators hide the latency of one
// after the other on any pipeline of up to 8 steps a lane; GPUs have more subgroups to switch to besides.
// Values settle at 2 (a = a/2 + 1), so nothing overflows or becomes subnormal. No memory but a write at the end.
#version 450
layout(local_size_x_id = 0) in; // spec: local_size
layout(set = 0, binding = 0) writeonly buffer Target { float target[]; }; // one of each invocation
layout(push_constant) uniform Push {
    uint rounds;
} p;

void main() {
    const uint i = gl_GlobalInvocationID.x;
    const vec4 half_ = vec4(0.5), one = vec4(1.0);
    vec4 a = vec4(float(i & 7u)), b = a + 1.0, c = a + 2.0, d = a + 3.0;
    vec4 e = a + 4.0, f = a + 5.0, g = a + 6.0, h = a + 7.0;
    for (uint round = 0u; round < p.rounds; round++) {
        a = a * half_ + one, b = b * half_ + one, c = c * half_ + one, d = d * half_ + one;
        e = e * half_ + one, f = f * half_ + one, g = g * half_ + one, h = h * half_ + one;
        a = a * half_ + one, b = b * half_ + one, c = c * half_ + one, d = d * half_ + one;
        e = e * half_ + one, f = f * half_ + one, g = g * half_ + one, h = h * half_ + one;
    }
    const vec4 sum = a + b + c + d + e + f + g + h;
    target[i] = sum.x + sum.y + sum.z + sum.w;
}
