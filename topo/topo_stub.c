#include "numoe_topo.h"
