// What cuda.cpp and libraries.cpp share.

#pragma once

#include <string>

#define API extern "C" __attribute__((visibility("default")))

int null_gpu_launch(struct CUstream_st* stream, const std::string& name);  // 0, or CUDA's error code
int null_gpu_count_unsafe(const char* call);                               // the same
void null_gpu_leave();  // ends the process where a graph is left that NCCL would wait for
