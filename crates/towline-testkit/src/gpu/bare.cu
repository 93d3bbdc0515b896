// The copy kernel that one would write by hand for one shape of block: a warp per block, 16 bytes a lane, pointers in a list.
// nvcc -arch=compute_75 -ptx bare.cu, with `.version 7.0` and `.target sm_70` put in by hand, is bare.ptx; a test compares them.
extern "C" __global__ void __launch_bounds__(256) bare_copy(const ulong2 *list, unsigned count, unsigned vectors)
{
    unsigned lane = threadIdx.x & 31;
    unsigned warps = gridDim.x * (blockDim.x >> 5);
    for (unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) >> 5; at < count; at += warps) {
        ulong2 pair = list[at];
        const uint4 *from = (const uint4 *)pair.x;
        uint4 *to = (uint4 *)pair.y;
#pragma unroll 8
        for (unsigned i = lane; i < vectors; i += 32)
            to[i] = from[i];
    }
}
