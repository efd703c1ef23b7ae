#include "numoe_pool.h"
