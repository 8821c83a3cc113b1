# The ROS 2 wheels on PyPI were built in a manylinux image, and some of their exported targets name that image's
# Python headers, /opt/python/cp3XX-cp3XX/include/... CMake refuses to generate with an include directory that does
# not exist, so drop such directories from every imported target once this one has been configured. On a ROS 2
# distribution, which has none, this does nothing.
function(_drop_missing_include_directories)
  get_property(targets DIRECTORY PROPERTY IMPORTED_TARGETS)
  foreach(target IN LISTS targets)
    get_target_property(directories ${target} INTERFACE_INCLUDE_DIRECTORIES)
    if(NOT directories)
      continue()
    endif()
    set(kept)
    foreach(directory IN LISTS directories)
      if(NOT directory MATCHES "^/opt/python/" OR EXISTS "${directory}")
        list(APPEND kept "${directory}")
      endif()
    endforeach()
    set_target_properties(${target} PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${kept}")
  endforeach()
endfunction()
cmake_language(DEFER CALL _drop_missing_include_directories)
