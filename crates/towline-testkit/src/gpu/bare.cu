// The copy kernel that one would write by hand for one shape of block: a warp per block, 16 bytes a lane, pointers in a list.
// nvcc -arch=sm_90 -ptx bare.cu -o bare.ptx
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
