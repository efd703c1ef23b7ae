/*
 * plan_form.h - what the writer and the reader of a plan must agree on.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef PLAN_FORM_H
#define PLAN_FORM_H

#define PLAN_FORM_KEY "numoe_plan" /* its value is the version */
enum {
    PLAN_FORM_VERSION = 1,
    PLAN_FORM_LIST = 65536 /* numbers in a list of the request */
};

#endif
