// For kernels of CPU devices: values that the driver can see are the same in a whole subgroup.
//
// Mesa's lavapipe loads from an address that it knows to be uniform with one scalar instruction, and LLVM
// joins eight of them that stand side by side into one vector load. From any other address it loads
// lane by lane, each with a test of the lane's mask and of the buffer's size: 20 to 30 times the
// instructions. What it knows to be uniform are push constants, constants, and what is computed from these
// (nir_src_is_always_uniform; not workgroup ids or loop counters); and it uses that only outside of all
// branches and loops, where it needs no mask (invocation_0_must_be_active). So a number such as
// gl_WorkGroupID.x is looked up, three bits at a time, in a table of push constants that holds 0 to 7.
// Everywhere else uniformly(v) is simply v. The table is a matrix and no array, because an index into an
// array of push constants would have to be the same in the whole workgroup.
// The push constants p have the table as `mat2x4 digits`: digits[i][j] is 4i + j, the bits of a uint.

uint uniformly(uint v, uint digits) { // v < 8^digits
    uint u = 0u;
    [[unroll]] for (uint i = 0u; i < digits; i++) {
        const uint digit = (v >> (3u * i)) & 7u;
        u |= floatBitsToUint(p.digits[digit >> 2u][digit & 3u]) << (3u * i);
    }
    return u;
}
