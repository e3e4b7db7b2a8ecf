// buckets-overlap - reduce while backward still computes.                                              20 minutes
//
//   compute:        B head | B block 2 | B block 1 | B embedding | wait | optimizer
//   communication:          | all-reduce 0 | all-reduce 1 | all-reduce 2 |
//
// Backward puts its work on the stream `compute` and calls bucket_is_full(overlap, i) as soon as all work that fills
// bucket i is *on the stream*; it need not have run yet. Reduce that bucket (a sum) on the stream `communication`. The
// host must not wait for anything in bucket_is_full: the next layer's backward has to be put on its stream at once.
// Before the optimizer's work goes onto `compute`, wait_for_buckets makes `compute` wait for all buckets, without stopping
// the host either. Two events per bucket, already created, tie the streams together:
//   cudaEventRecord(event, stream)             marks a point of a stream
//   cudaStreamWaitEvent(stream, event, 0)      work put on `stream` from now on runs after that point
//   dp.all_reduce(tensor, Reduce::sum, stream)
#include "exercises.h"

void bucket_is_full(Overlap& o, int bucket) {
  //! hole 4
  CUDA_CHECK(cudaEventRecord(o.ready[bucket], o.compute));
  //~ host-waits: CUDA_CHECK(cudaStreamSynchronize(o.compute)), CUDA_CHECK(cudaEventRecord(o.ready[bucket], o.compute));
  //~ says: the host waits in bucket_is_full
  CUDA_CHECK(cudaStreamWaitEvent(o.communication, o.ready[bucket], 0));
  //~ no-ready:
  //~ says: the bucket was reduced before it was full
  //~ wrong-stream: CUDA_CHECK(cudaStreamWaitEvent(o.compute, o.ready[bucket], 0));
  //~ says: the bucket was reduced before it was full
  o.dp.all_reduce(o.buckets[bucket], Reduce::sum, o.communication);
  //~ on-compute: o.dp.all_reduce(o.buckets[bucket], Reduce::sum, o.compute);
  //~ says: on the compute stream
  //~ first-bucket: o.dp.all_reduce(o.buckets[0], Reduce::sum, o.communication);
  //~ says: each bucket once
  CUDA_CHECK(cudaEventRecord(o.done[bucket], o.communication));
  //! end
}

void wait_for_buckets(Overlap& o) {
  //! hole 2
  for (cudaEvent_t done : o.done) CUDA_CHECK(cudaStreamWaitEvent(o.compute, done, 0));
  //~ no-done:
  //~ says: the optimizer read a bucket that was not reduced yet
  //~ first-done: CUDA_CHECK(cudaStreamWaitEvent(o.compute, o.done[0], 0));
  //~ says: the optimizer read a bucket that was not reduced yet
  //! end
}
//? hint 1: Which stream must wait for which, and where: before the all-reduce, and before the optimizer?
//? hint 2: record ready on compute; communication waits for ready; all-reduce on communication; record done there. In
//?         the end compute waits for every done.
//? hint 3: CUDA_CHECK(cudaEventRecord(o.ready[bucket], o.compute));
//? why: Backward finishes the last layers first, so their gradients travel while earlier layers still compute; only the
//?      last bucket stays exposed. Events order the streams while the host runs ahead.
//? asked: S3: which communication overlaps with which compute? (DP/FSDP/TP/PP/EP 的通信各能与哪些计算重叠？)
