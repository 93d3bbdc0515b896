//! The entry functions of the fuzz targets.
