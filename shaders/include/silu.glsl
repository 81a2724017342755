// silu(x) = x / (1 + exp(-x)), for every x. Below -88 the exact value is under 6e-37 and exp(-x) would
// overflow (to infinity, or on some drivers to a large number that leaves garbage): it is 0 there.
float silu(float x) {
    return x < -88.0 ? 0.0 : x / (1.0 + exp(-x));
}
