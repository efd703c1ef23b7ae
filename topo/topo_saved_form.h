/*
 * topo_saved_form.h - what the writer and the reader of a saved machine must agree on.
 *
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef TOPO_SAVED_FORM_H
#define TOPO_SAVED_FORM_H

#define TOPO_SAVED_KEY "numoe_machine" /* its value is the version */
enum {
    TOPO_SAVED_VERSION = 1,
    TOPO_SAVED_DEVICES = 4096,
    TOPO_SAVED_NOTES = 4096,
    TOPO_SAVED_PAIRS = 65536,
    TOPO_SAVED_TEXT = 8192 /* bytes of a note or of the source */
};

#endif
