#include "numoe.h"
