// Reductions over a workgroup through shared memory: no subgroup operations, any subgroup size. The
// workgroup's size is a power of two, at most 256. A tree of log2(size) barriers, in which the active
// invocations are neighbours: no bank conflicts.
shared float reduce_floats[gl_WorkGroupSize.x];

// Sum of x over the workgroup, in every invocation.
float workgroup_sum(float x) {
    const uint i = gl_LocalInvocationID.x;
    reduce_floats[i] = x;
    barrier();
    for (uint width = gl_WorkGroupSize.x / 2u; width > 0u; width /= 2u) {
        if (i < width) reduce_floats[i] += reduce_floats[i + width];
        barrier();
    }
    return reduce_floats[0];
}
