// Philox4x32-10: four random words from a counter and a key, without state (Salmon, Moraes, Dror, Shaw:
// "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
uvec4 philox(uvec4 counter, uvec2 key) {
    for (uint i = 0u; i < 10u; i++) {
        uvec2 a, b; // high, low
        umulExtended(0xD2511F53u, counter.x, a.x, a.y);
        umulExtended(0xCD9E8D57u, counter.z, b.x, b.y);
        counter = uvec4(b.x ^ counter.y ^ key.x, b.y, a.x ^ counter.w ^ key.y, a.y);
        key += uvec2(0x9E3779B9u, 0xBB67AE85u);
    }
    return counter;
}
