/* SANITIZED: 1 where a sanitizer has taken the allocator's place, keeps what is freed and makes all
 * slow; else 0. SPDX-License-Identifier: Apache-2.0 */
#ifndef NUMOE_SANITIZED_H
#define NUMOE_SANITIZED_H

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif
#ifndef SANITIZED
#define SANITIZED 0
#endif

#endif
