/*
 * unroll.h - UNROLL before a loop of constant bounds: the vector arrays it indexes then live in
 * registers. Under a sanitizer loops stay loops: instrumented straight-line code of this size takes
 * minutes to compile and finds nothing more.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef NUMOE_UNROLL_H
#define NUMOE_UNROLL_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define NUMOE_ROLLED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define NUMOE_ROLLED 1
#endif
#endif

#ifdef NUMOE_ROLLED
#define UNROLL _Pragma("GCC unroll 1")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif

#endif
