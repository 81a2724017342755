// gelu(x) = x Phi(x) in its tanh form (Hendrycks & Gimpel 2016), x / 2 (1 + tanh u) with
// u = sqrt(2 / pi) (x + 0.044715 x^3): the same as x / (1 + exp(-2 u)), which needs no tanh, whose error a
// device may let grow. Below -88 exp(-2 u) would overflow, and the value is 0 to within f32.
float gelu_tanh(float x) {
    const float twice_u = 1.5957691216057308 * (x + 0.044715 * x * x * x);
    return twice_u < -88.0 ? 0.0 : x / (1.0 + exp(-twice_u));
}
