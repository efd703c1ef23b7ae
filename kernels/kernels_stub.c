#include "numoe_kernels.h"
